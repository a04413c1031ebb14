"""The binary layout of a GGUF file: metadata, then tensor descriptions, then data."""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from jaxinfer.errors import CheckpointError

# Scalar value types, by the code the file gives them.
_SCALARS = {code: struct.Struct(f"<{letter}") for code, letter in enumerate("BbHhIif?")}
_SCALARS |= {10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d")}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MAX_DEPTH = 4  # of nested arrays


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor as the file describes it.

    Attributes:
        shape: row-major, so the reverse of the file's order.
        kind: how its values are coded.
        start: byte offset in the file.
        num_bytes: its size there.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """Everything before the data of a GGUF file."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> GGUFHeader:
    """Parse a file's header and check that the file is long enough for every tensor.

    Raises:
        CheckpointError: the file is not GGUF, of another version, corrupt or truncated.
    """
    try:
        data = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:  # numpy refuses to map an empty file
        raise CheckpointError(f"{path} can't be read as GGUF: {error}") from error
    if data[:4].tobytes() != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it must start with 'GGUF', got {data[:4].tobytes()!r}")
    cursor = _Cursor(path, data.data)
    version = cursor.scalar(_U32)
    if version not in (2, 3):
        raise CheckpointError(f"{path} must be of GGUF version 2 or 3, little-endian, got version {version}")
    num_tensors, num_keys = cursor.scalar(_U64), cursor.scalar(_U64)
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar(_U32))
    described = [cursor.tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise CheckpointError(f"{path} must have a positive general.alignment, got {alignment!r}")
    base = -(-cursor.offset // alignment) * alignment
    return GGUFHeader(metadata=metadata, tensors=_place(path, described, base, data.size))


def _place(
    path: Path, described: list[tuple[str, tuple[int, ...], int, int]], base: int, size: int
) -> dict[str, StoredTensor]:
    tensors = {}
    for name, shape, code, offset in described:
        try:
            kind = GGMLQuantizationType(code)
        except ValueError as error:
            raise CheckpointError(f"{path} stores {name} in an unknown quantisation type {code}") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise CheckpointError(
                f"{path} stores {name} as {kind.name}: rows must be a multiple of {block}, got {shape}"
            )
        tensor = StoredTensor(shape=shape, kind=kind, start=base + offset, num_bytes=prod(shape) // block * block_bytes)
        if tensor.start + tensor.num_bytes > size:
            raise CheckpointError(
                f"{path} is truncated: the tensor {name} ends at byte {tensor.start + tensor.num_bytes}, "
                f"the file at {size}; download it again"
            )
        tensors[name] = tensor
    return tensors


class _Cursor:
    """Reads values one after the other, never past the end."""

    def __init__(self, path: Path, data: memoryview):
        self._path, self._data = path, data
        self.offset = 4  # after the magic

    def _advance(self, count: int) -> int:
        """Offset of the next `count` bytes, now passed."""
        start = self.offset
        if count > len(self._data) - start:
            raise CheckpointError(
                f"{self._path} is truncated: it ends inside its header ({len(self._data)} bytes); download it again"
            )
        self.offset += count
        return start

    def scalar(self, layout: struct.Struct) -> Any:
        """A number or a flag."""
        return layout.unpack_from(self._data, self._advance(layout.size))[0]

    def string(self) -> str:
        """A length and as many bytes of UTF-8; vocabularies may hold broken ones."""
        count = self.scalar(_U64)
        start = self._advance(count)
        return str(self._data[start : start + count], "utf-8", "replace")

    def value(self, code: int, depth: int = 0) -> Any:
        """A metadata value of the type that `code` stands for."""
        if code in _SCALARS:
            return self.scalar(_SCALARS[code])
        if code == _STRING:
            return self.string()
        if code != _ARRAY or depth == _MAX_DEPTH:
            raise CheckpointError(f"{self._path} has a corrupt header: unknown value type {code}; download it again")
        item, count = self.scalar(_U32), self.scalar(_U64)
        if item in _SCALARS:
            layout = _SCALARS[item]
            start = self._advance(count * layout.size)
            return np.frombuffer(self._data, np.dtype(layout.format), count, start).tolist()
        return [self.value(item, depth + 1) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, row-major shape, type code and offset from the start of the data."""
        name = self.string()
        num_dims = self.scalar(_U32)
        if not 1 <= num_dims <= 4:
            raise CheckpointError(
                f"{self._path} gives {name!r} {num_dims} dimensions, expected 1 to 4; download it again"
            )
        shape = tuple(self.scalar(_U64) for _ in range(num_dims))[::-1]
        return name, shape, self.scalar(_U32), self.scalar(_U64)
