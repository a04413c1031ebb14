"""What the loader needs of a checkpoint, whatever its format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxinfer.errors import CheckpointError, ModelNotFoundError
from jaxinfer.io.gguf import GGUFCheckpoint
from jaxinfer.io.safetensors import SafetensorsCheckpoint


@runtime_checkable
class Checkpoint(Protocol):
    """An open checkpoint; tensors are read one at a time, on demand.

    Attributes:
        path: the folder or file it was opened from.
        config: the contents of `config.json`, or their equivalent.
        generation_config: the contents of `generation_config.json`; empty where there is none.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Row-major shape of every stored tensor, by Hugging Face name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, not to be written to."""
        ...

    def close(self) -> None:
        """Let go of the files; arrays already read stay valid."""
        ...

    def __enter__(self) -> "Checkpoint":
        """The checkpoint itself."""
        ...

    def __exit__(self, *exc_info: object) -> None:
        """Close."""
        ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder or a GGUF file, reading headers only.

    Raises:
        ModelNotFoundError: there is no model at the path.
        CheckpointError: a file is missing, truncated or corrupt.
        UnsupportedModelError: the model is of a kind that is not implemented.
    """
    path = Path(path)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"expected the folder with config.json and its weights, got the file {path}")
    if not path.is_file():
        raise ModelNotFoundError(f"expected a model folder or a .gguf file, but {path} does not exist")
    return GGUFCheckpoint(path)
