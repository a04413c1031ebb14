"""Options that several verbs share."""

from typing import Annotated

import typer

from jaxinfer.io.demo_model import DEMO_MODEL

Model = Annotated[str, typer.Option("--model", "-m", help="Built-in name, folder, GGUF file or hub id.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; float32 on CPU, else bfloat16.")]
MaxTokens = Annotated[
    int | None, typer.Option(help="Tokens to generate; 256, or what the context leaves, if not given.")
]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopK = Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Sample from the most likely tokens that hold this much probability.")]
MinP = Annotated[float, typer.Option(help="Sample from tokens at least this fraction as likely as the best.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this string; may be repeated.")]

DEFAULT_MODEL = DEMO_MODEL
