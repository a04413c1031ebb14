"""Hugging Face folders: `config.json` and one or more safetensors files, memory-mapped."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_LENGTH_BYTES = 8  # a file starts with its header's length, little-endian


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """Where one tensor lies."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # byte offset in the file

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsCheckpoint:
    """A folder as `save_pretrained` writes it; tensors come in the dtype they are stored in.

    Args:
        folder: holds `config.json` and `model.safetensors`, or shards and their index.

    Raises:
        ModelNotFoundError: the folder has no `config.json`.
        CheckpointError: a weight file is missing, truncated or corrupt.
        UnsupportedModelError: the weights are quantised.
    """

    def __init__(self, folder: Path):
        self.path = Path(folder)
        if not (self.path / "config.json").is_file():
            raise ModelNotFoundError(f"{folder} is not a model folder: expected config.json in it")
        self.config: dict[str, Any] = read_json(self.path / "config.json")
        _refuse_quantised(self.path, self.config)
        generation = self.path / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json(generation) if generation.is_file() else {}
        self._entries = _find_tensors(self.path)
        self._maps: dict[Path, np.memmap] = {}
        self._is_closed = False

    @property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor, as a read-only view of the file.

        Raises:
            CheckpointError: there is no such tensor, or the checkpoint is closed.
        """
        if self._is_closed:
            raise CheckpointError(f"{self.path} is closed; open it again to read {name}")
        if name not in self._entries:
            raise CheckpointError(f"{self.path} holds no tensor named {name!r}")
        entry = self._entries[name]
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, np.uint8, mode="r")
        raw = np.asarray(self._maps[entry.file])[entry.start : entry.start + entry.num_bytes]
        return raw.view(entry.dtype).reshape(entry.shape)

    def close(self) -> None:
        """Let go of the files; arrays already read stay valid."""
        self._maps.clear()
        self._is_closed = True

    def __enter__(self) -> "SafetensorsCheckpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: the file can't be read, or holds something else.
    """
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} must be readable JSON, but {error}; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def _refuse_quantised(folder: Path, config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"{folder} holds weights quantised by {method!r}, which is not implemented; "
            "use the unquantised model, or GGUF"
        )


def _find_tensors(folder: Path) -> dict[str, _Entry]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return _read_header(single)
    if index.is_file():
        return _read_shards(folder, index)
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder} holds pytorch_model.bin only; convert it to safetensors, "
            "with save_pretrained where PyTorch is installed"
        )
    raise CheckpointError(f"{folder} holds no weights: expected model.safetensors or model.safetensors.index.json")


def _read_shards(folder: Path, index: Path) -> dict[str, _Entry]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index} must map tensors to files under 'weight_map'; download it again")
    missing = sorted(shard for shard in set(weight_map.values()) if not (folder / shard).is_file())
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which its index names; download it again")
    headers = {shard: _read_header(folder / shard) for shard in set(weight_map.values())}
    lost = sorted(name for name, shard in weight_map.items() if name not in headers[shard])
    if lost:
        raise CheckpointError(
            f"{folder / weight_map[lost[0]]} lacks the tensor {lost[0]!r}, which {index.name} puts there"
        )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _read_header(file: Path) -> dict[str, _Entry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise CheckpointError(
                f"{file} is truncated or no safetensors file: it ends inside its header ({size} bytes)"
            )
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file} has a corrupt header ({error}); download it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a corrupt header: expected a JSON object; download it again")
    header.pop("__metadata__", None)
    return {name: _entry(file, size, _LENGTH_BYTES + length, name, value) for name, value in header.items()}


def _entry(file: Path, size: int, base: int, name: str, value: Any) -> _Entry:
    try:
        dtype_name, shape, (start, end) = (
            value["dtype"],
            tuple(map(int, value["shape"])),
            map(int, value["data_offsets"]),
        )
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file} describes the tensor {name!r} wrongly; download it again") from error
    if dtype_name not in _DTYPES:
        raise CheckpointError(f"{file} stores {name!r} as {dtype_name}; expected one of {', '.join(_DTYPES)}")
    entry = _Entry(file=file, dtype=_DTYPES[dtype_name], shape=shape, start=base + start)
    if start < 0 or min(shape, default=0) < 0 or end - start != entry.num_bytes:
        raise CheckpointError(f"{file} gives {name!r} {end - start} bytes, but its shape needs {entry.num_bytes}")
    if base + end > size:
        raise CheckpointError(f"{file} is truncated: {name!r} ends at byte {base + end}, the file at {size}")
    return entry
