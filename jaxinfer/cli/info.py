"""`jaxinfer info`: what a model is and what it will take, without loading it."""

from dataclasses import asdict
from typing import Annotated

import typer

from jaxinfer.cli import options
from jaxinfer.cli.progress import StderrProgress
from jaxinfer.config import EngineConfig


def info(
    model: Annotated[str, typer.Argument(help="Built-in name, folder, GGUF file or hub id.")] = options.DEFAULT_MODEL,
    dtype: options.Dtype = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus output, in tokens.")] = None,
) -> None:
    """Show a model's configuration, parameters and memory plan."""
    settings = EngineConfig(dtype=dtype, max_model_len=max_model_len)
    with StderrProgress() as progress:
        from jaxinfer.io.checkpoint import open_checkpoint
        from jaxinfer.io.hub import resolve_model
        from jaxinfer.load import model_config, num_parameters, plan_model
        from jaxinfer.models.registry import family_of

        path = resolve_model(model, progress=progress)
        with open_checkpoint(path) as checkpoint:
            config = model_config(checkpoint)
            count = num_parameters(config, family_of(checkpoint.config))
            plan = plan_model(checkpoint, config, settings)
    print(f"{path}\n")
    for name, value in asdict(config).items():
        if value not in (None, (), False) and name != "rope":
            print(f"{name:<24} {value}")
    print(
        f"{'parameters':<24} {count:,}\n{'KV bytes per token':<24} {plan.kv_bytes_per_token:,}\n\nMemory plan\n{plan}",
        flush=True,  # here, where a closed pipe is met quietly
    )
