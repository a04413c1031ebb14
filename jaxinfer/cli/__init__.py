"""The `jaxinfer` command: one verb per file."""

import sys

import typer

from jaxinfer.cli import bench, chat, generate, info
from jaxinfer.errors import JaxinferError

app = typer.Typer(
    help="Fast, exact inference of decoder language models in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("info")(info.info)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command; bad input ends with one sentence and status 2."""
    try:
        app()
    except JaxinferError as error:
        print(f"jaxinfer: {error}", file=sys.stderr)
        sys.exit(2)
