"""Decode and prefill speed of one model on this machine, alone or turn by turn beside a peer."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams

Result = dict[str, Any]

PROMPT_TOKENS = 32  # before decoding
NEW_TOKENS = 64  # timed decode steps
PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class Measurement:
    """What a row of the result times: `decode` a batch, `prefill` a prompt, or the `first` token of a new process."""

    kind: str
    size: int = 1

    @property
    def command(self) -> str:
        """As peers are asked for it."""
        return self.kind if self.kind == "first" else f"{self.kind} {self.size}"


Measure = Callable[[Measurement], Result]


class Subject:
    """Our side: the engine, timed from its requests' own clocks."""

    def __init__(self, llm: LLM, model: str):
        self._llm = llm
        self._model = model
        self._random = np.random.default_rng(0)

    def measure(self, what: Measurement) -> Result:
        """One timing: tokens per second, or seconds for `first`."""
        if what.kind == "first":
            return {"seconds": self._first_token()}
        if what.kind == "decode":
            return {"tokens_per_second": self._decode(what.size)}
        return {"tokens_per_second": what.size / self._prefill(what.size)}

    def _decode(self, batch: int) -> float:
        """Steady-state greedy decoding, the prompt excluded."""
        outputs = self._generate([self._prompt(PROMPT_TOKENS) for _ in range(batch)], NEW_TOKENS + 1)
        times = [output.timings for output in outputs if output.timings]
        return batch * NEW_TOKENS / max(timing.total - timing.time_to_first_token for timing in times)

    def _prefill(self, tokens: int) -> float:
        start = time.perf_counter()
        self._generate([self._prompt(tokens)], 1)
        return time.perf_counter() - start

    def _first_token(self) -> float:
        """A fresh `jaxinfer generate` until text appears, caches warm."""
        command = [sys.executable, "-m", "jaxinfer.cli", "generate", "Hello", "--max-tokens", "8", "-m", self._model]
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            shown = process.stdout.read(1)
            seconds = time.perf_counter() - start
        if not shown:
            raise RuntimeError(f"{command} printed nothing; run it by hand to see why")
        return seconds

    def _generate(self, prompts: list[list[int]], max_tokens: int) -> Any:
        outputs = self._llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        for error in (output.error for output in outputs if output.error):
            raise error
        return outputs

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.integers(100, self._llm.config.vocab_size, tokens).tolist()


class Peer:
    """Another program that answers a measurement per line; see `peers/transformers_latency.py`."""

    def __init__(self, command: list[str]):
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            self.description = self._answer()
        except BaseException:
            self.close()
            raise

    def measure(self, what: Measurement) -> Result:
        """Ask for one timing."""
        assert self._process.stdin is not None
        print(what.command, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Result:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended without an answer; run it by hand to see why")
        return json.loads(line)

    def close(self) -> None:
        """End the program."""
        self._process.kill()
        self._process.communicate()


def transformers_peer(model: Path, *, threads: int) -> Peer:
    """The transformers of this interpreter's environment, which must have PyTorch."""
    script = PEERS / "transformers_latency.py"
    return Peer([sys.executable, str(script), str(model), "--serve", "--repeats", "1", "--threads", str(threads)])


def run(
    ours: Measure,
    theirs: Measure | None,
    measurements: Iterable[Measurement],
    *,
    repeats: int,
    report: Callable[[Result], None],
) -> list[Result]:
    """Alternate both sides, after one warm-up each, and take medians.

    Returns:
        A row per measurement; `ratio` is our speed over the peer's, the median of the ratios of adjacent runs.
    """
    rows = []
    for what in measurements:
        sides = [ours] + ([theirs] if theirs else [])
        rounds = [[_value(side(what)) for side in sides] for _ in range(repeats + 1)][1:]
        unit = "seconds" if what.kind == "first" else "tokens_per_second"
        mine = [values[0] for values in rounds]
        row: Result = {"kind": what.kind, "size": what.size, "n": repeats, unit: statistics.median(mine), "all": mine}
        if theirs:
            yours = [values[1] for values in rounds]
            speedups = [b / a if what.kind == "first" else a / b for a, b in rounds]
            row |= {f"peer_{unit}": statistics.median(yours), "ratio": statistics.median(speedups), "all_peer": yours}
        report(row)
        rows.append(row)
    return rows


def describe(llm: LLM, model: str) -> Result:
    """What the numbers were measured on."""
    device = jax.devices()[0]
    return {
        "model": model,
        "dtype": str(llm.plan.dtype),
        "device": device.device_kind,
        "platform": device.platform,
        "versions": {"jax": jax.__version__, "jaxinfer": version("jaxinfer"), "python": sys.version.split()[0]},
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
    }


def _value(result: Result) -> float:
    return result.get("tokens_per_second") or result["seconds"]
