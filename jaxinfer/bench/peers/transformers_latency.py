"""Time transformers on this machine, in an environment that has it and PyTorch: the yardstick of `jaxinfer bench`.

`python transformers_latency.py FOLDER` measures everything and prints one JSON object. With `--serve` it answers each
line of standard input, `decode 8`, `prefill 1024`, `first` or `quit`, with one JSON line, so that another program can
alternate measurements of both within one run. It stands alone: no import of jaxinfer, none of PyTorch until run.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Result = dict[str, Any]


class Peer:
    """A loaded model and what it takes to time it at its best."""

    def __init__(self, folder: str, *, threads: int, repeats: int, prompt_tokens: int, new_tokens: int):
        """Load the model in float32 with transformers' default attention."""
        self.folder, self.threads, self.repeats = folder, threads, repeats
        self.prompt_tokens, self.new_tokens = prompt_tokens, new_tokens
        self.model = load_model(folder, threads)
        self._caches: dict[int, str] = {}  # batch size: the faster cache

    def decode(self, batch: int) -> Result:
        """Steady-state greedy decoding, the prompt excluded; the faster of transformers' two caches."""
        cache = self._caches.get(batch) or self._faster_cache(batch)
        seconds = [self._decode_seconds(batch, cache) for _ in range(self.repeats)]
        work = {"batch": batch, "prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens, "cache": cache}
        return rate("decode", batch * self.new_tokens, seconds) | work

    def prefill(self, tokens: int) -> Result:
        """One prompt, logits of its last token only."""
        import torch

        def run() -> None:
            ids = torch.randint(3, self.model.config.vocab_size, (1, tokens))
            self.model(ids, use_cache=True, logits_to_keep=1)

        return rate("prefill", tokens, self._timed(run)) | {"batch": 1, "prompt_tokens": tokens}

    def first_token(self) -> Result:
        """A fresh process: interpreter, imports, weights, a prompt, one token."""
        command = [sys.executable, str(Path(__file__).resolve()), self.folder, "--once"]
        command += ["--threads", str(self.threads), "--prompt-tokens", str(self.prompt_tokens)]
        seconds = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
                line = process.stdout.readline() if process.stdout else ""
                seconds.append(time.perf_counter() - start)
            if not line or process.returncode:
                raise RuntimeError(f"{command} failed; run it by hand to see why")
        return {"kind": "first", "seconds": statistics.median(seconds), "n": len(seconds), "all_seconds": seconds}

    def _timed(self, run: Callable[[], None]) -> list[float]:
        """Seconds of each repeat after one warm-up."""
        import torch

        seconds = []
        with torch.inference_mode():
            for _ in range(self.repeats + 1):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def _faster_cache(self, batch: int) -> str:
        """Which cache decodes this batch faster; alternates, so that a slow moment strikes both."""
        self._decode_seconds(batch, "dynamic")  # warm-up
        trials = [(self._decode_seconds(batch, cache), cache) for cache in ("dynamic", "static") * 2]
        self._caches[batch] = min(trials)[1]
        return self._caches[batch]

    def _decode_seconds(self, batch: int, cache_kind: str) -> float:
        import torch
        import transformers

        room = self.prompt_tokens + self.new_tokens + 1
        ids = torch.randint(3, self.model.config.vocab_size, (batch, self.prompt_tokens))
        with torch.inference_mode():
            if cache_kind == "static":
                cache = transformers.StaticCache(config=self.model.config, max_cache_len=room)
            else:
                cache = transformers.DynamicCache(config=self.model.config)
            step = {cache_argument(self.model): cache, "use_cache": True, "logits_to_keep": 1}
            last = self.model(ids, **step).logits[:, -1].argmax(-1, keepdim=True)
            start = time.perf_counter()
            for _ in range(self.new_tokens):
                last = self.model(last, **step).logits[:, -1].argmax(-1, keepdim=True)
            return time.perf_counter() - start


def load_model(folder: str, threads: int) -> Any:
    """The model of a Hugging Face folder or a GGUF file, in float32 on `threads` threads."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    path = Path(folder)
    source = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    place = path.parent if source else path
    return transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **source).eval()


def cache_argument(model: Any) -> str:
    """Name of `forward`'s cache parameter, which transformers 5 changed."""
    import inspect

    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def rate(kind: str, tokens: int, seconds: list[float]) -> Result:
    """Tokens per second at the median time."""
    median = statistics.median(seconds)
    return {"kind": kind, "tokens_per_second": tokens / median, "seconds": median, "n": len(seconds)}


def describe(threads: int) -> Result:
    """The machine and what runs on it."""
    return {
        "peer": "transformers",
        "device": "cpu",
        "device_model": cpu_model(),
        "threads": threads,
        "dtype": "float32",
        "versions": {name: version(name) for name in ("transformers", "torch")} | {"python": platform.python_version()},
    }


def cpu_model() -> str:
    """The processor's name as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def once(folder: str, threads: int, prompt_tokens: int) -> None:
    """Print one token of a fresh process."""
    import torch

    model = load_model(folder, threads)
    with torch.inference_mode():
        ids = torch.randint(3, model.config.vocab_size, (1, prompt_tokens))
        print(int(model(ids, logits_to_keep=1).logits[0, -1].argmax()), flush=True)


def serve(peer: Peer) -> None:
    """Answer commands until `quit` or the end of input; a ready line with the machine's description comes first."""
    print(json.dumps(describe(peer.threads)), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["decode", batch]:
                answer = peer.decode(int(batch))
            case ["prefill", tokens]:
                answer = peer.prefill(int(tokens))
            case ["first"]:
                answer = peer.first_token()
            case ["quit"]:
                return
            case _:
                answer = {"error": f"expected 'decode N', 'prefill N', 'first' or 'quit', got {line.strip()!r}"}
        print(json.dumps(answer), flush=True)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description="Time transformers on a Hugging Face folder.")
    parser.add_argument("folder", help="or a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="measurements behind each median")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=32, help="before decoding")
    parser.add_argument("--new-tokens", type=int, default=64, help="timed decode steps")
    parser.add_argument("--prefill-tokens", type=int, default=1024)
    parser.add_argument("--serve", action="store_true", help="answer commands from standard input")
    parser.add_argument("--once", action="store_true", help="emit one token and end")
    args = parser.parse_args()
    if args.once:
        return once(args.folder, args.threads, args.prompt_tokens)
    peer = Peer(
        args.folder,
        threads=args.threads,
        repeats=args.repeats,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
    )
    if args.serve:
        return serve(peer)
    results = [peer.decode(batch) for batch in args.batches]
    results += [peer.prefill(args.prefill_tokens), peer.first_token()]
    print(json.dumps(describe(args.threads) | {"results": results}, indent=2))
    return None


if __name__ == "__main__":
    main()
