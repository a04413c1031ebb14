"""`jaxinfer generate`: one prompt in, text out as it is generated."""

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from jaxinfer.cli import options
from jaxinfer.cli.progress import StderrProgress
from jaxinfer.errors import RequestError
from jaxinfer.sampling_params import SamplingParams


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; read from stdin if it is missing or '-'.")] = None,
    model: options.Model = options.DEFAULT_MODEL,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages tokens seen before.")] = 1.0,
    stop: options.Stop = None,
    seed: options.Seed = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples; more than one needs --json.")] = 1,
    logprobs: Annotated[int | None, typer.Option(help="Report log probabilities and this many alternatives.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when done.")] = False,
    dtype: options.Dtype = None,
) -> None:
    """Generate text from a prompt.

    A model with a chat template answers the prompt as a user's message; --raw continues it instead.
    """
    text = sys.stdin.read() if prompt is None or prompt == "-" else prompt
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()),
        seed=seed,
        logprobs=logprobs,
    )
    if not as_json and (n != 1 or logprobs is not None):
        raise RequestError("several samples and log probabilities are printed with --json only; add it")
    _run(model, text, params, dtype=dtype, raw=raw, as_json=as_json)


def _run(model: str, text: str, params: SamplingParams, *, dtype: str | None, raw: bool, as_json: bool) -> None:
    with StderrProgress() as progress:
        progress("Starting JAX", 0, 0)
        from jaxinfer.llm import LLM

        with LLM(model, dtype=dtype, progress=progress) as llm:
            progress.say(llm.plan.summary)
            prompt = text
            if not raw and llm.tokenizer.has_chat_template:
                prompt = llm.tokenizer.chat_ids([{"role": "user", "content": text}])
            if as_json:
                output = asdict(llm.generate(prompt, params))
                progress.pause()
                print(json.dumps(output | {"prompt": text}, ensure_ascii=False), flush=True)
                return
            for piece in llm.stream(prompt, params):
                progress.mute()
                print(piece, end="", flush=True)
            progress.pause()
            print(flush=True)
