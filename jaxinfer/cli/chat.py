"""`jaxinfer chat`: a conversation in the terminal."""

from typing import Annotated

import typer

from jaxinfer.cli import options
from jaxinfer.cli.progress import StderrProgress
from jaxinfer.errors import RequestError
from jaxinfer.sampling_params import SamplingParams


def chat(
    model: options.Model = options.DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="Instructions the model gets before the conversation.")] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    stop: options.Stop = None,
    seed: options.Seed = None,
    dtype: options.Dtype = None,
) -> None:
    """Chat with a model; an empty line or Ctrl-D ends it, Ctrl-C ends an answer."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=tuple(stop or ()),
        seed=seed,
    )
    messages = [{"role": "system", "content": system}] if system else []
    with StderrProgress() as progress:
        progress("Starting JAX", 0, 0)
        from jaxinfer.llm import LLM

        with LLM(model, dtype=dtype, progress=progress) as llm:
            progress.say(llm.plan.summary)
            while text := _ask():
                messages.append({"role": "user", "content": text})
                try:
                    answer = _answer(llm.stream_chat(messages, params), progress)
                except RequestError as error:  # the conversation outgrew the context: keep what there was
                    typer.echo(f"jaxinfer: {error}", err=True)
                    messages.pop()
                else:
                    messages.append({"role": "assistant", "content": answer})


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _answer(pieces, progress: StderrProgress) -> str:
    answer = ""
    try:
        for piece in pieces:
            progress.mute()
            print(piece, end="", flush=True)
            answer += piece
    except KeyboardInterrupt:
        pieces.close()
    progress.pause()
    print(flush=True)
    return answer
