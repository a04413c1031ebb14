"""`jaxinfer bench`: timings that users can repeat."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from jaxinfer.cli import options
from jaxinfer.cli.progress import StderrProgress

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure speed on this machine."""


@app.command()
def latency(
    model: options.Model = options.DEFAULT_MODEL,
    batch: Annotated[list[int], typer.Option(help="Batch size to decode; may be repeated.")] = [1, 8, 32],  # noqa: B006
    prefill: Annotated[int, typer.Option(min=1, help="Prompt tokens to prefill.")] = 1024,
    repeats: Annotated[int, typer.Option(min=1, help="Timings behind each median.")] = 5,
    against: Annotated[str | None, typer.Option(help="'transformers': time it too, turn by turn.")] = None,
    first_token: Annotated[bool, typer.Option(help="Also time a new process to its first token.")] = True,
    output: Annotated[Path | None, typer.Option(help="Write the result here as JSON.")] = None,
    dtype: options.Dtype = None,
) -> None:
    """Decode tokens/s, prefill tokens/s and seconds to the first token.

    Decoding is greedy, 64 tokens after a prompt of 32, and excludes the prompt.
    """
    if against not in (None, "transformers"):
        raise typer.BadParameter(f"against must be 'transformers', got {against!r}")
    with StderrProgress() as progress:
        from jaxinfer.bench import latency
        from jaxinfer.io.hub import resolve_model
        from jaxinfer.llm import LLM

        measurements = [latency.Measurement("decode", size) for size in batch]
        measurements.append(latency.Measurement("prefill", prefill))
        if first_token:
            measurements.append(latency.Measurement("first"))
        with LLM(model, dtype=dtype, max_num_seqs=max(batch), progress=progress) as llm:
            progress.pause()
            peer = None
            if against:
                peer = latency.transformers_peer(Path(resolve_model(model)), threads=os.cpu_count() or 1)
            result = latency.describe(llm, model) | {"peer": peer.description if peer else None}
            ours, theirs = latency.Subject(llm, model).measure, peer.measure if peer else None
            try:
                result["results"] = latency.run(ours, theirs, measurements, repeats=repeats, report=_print_row)
            finally:
                if peer:
                    peer.close()
    if output:
        output.write_text(json.dumps(result, indent=2) + "\n")


def _print_row(row: dict) -> None:
    unit = "s to first token" if row["kind"] == "first" else "tokens/s"
    key = "seconds" if row["kind"] == "first" else "tokens_per_second"
    line = f"{row['kind']:<8}{row['size']:>6}  {row[key]:8.2f} {unit}"
    if "ratio" in row:
        line += f"   peer {row['peer_' + key]:8.2f}   {row['ratio']:.2f} times its speed"
    print(line, flush=True)
