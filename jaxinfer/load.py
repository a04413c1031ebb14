"""Checkpoint to `Params`: every tensor accounted for, read one at a time, placed on the device."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.plan import MemoryPlan, plan_memory
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.errors import CheckpointError
from jaxinfer.io.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.io.hub import resolve_model
from jaxinfer.io.tokenizer import Tokenizer, load_tokenizer
from jaxinfer.models.registry import Family, Source, family_of
from jaxinfer.types import Params

_ALIGNMENT = 64  # bytes; what XLA:CPU asks of a buffer
Progress = Callable[[str, int, int], None]  # what is happening, done, total


def model_config(checkpoint: Checkpoint) -> ModelConfig:
    """The checkpoint's configuration, translated.

    Raises:
        UnsupportedModelError: unknown architecture, or a setting that would change the numbers.
    """
    return family_of(checkpoint.config).translate(checkpoint.config)


def num_parameters(config: ModelConfig, family: Family) -> int:
    """Parameters on the device, tied ones counted once."""
    return sum(prod(source.shape) for source in _leaves(family.sources(config)))


def load_params(
    checkpoint: Checkpoint, config: ModelConfig, *, dtype: jnp.dtype, progress: Progress | None = None
) -> Params:
    """Read every parameter, one tensor in host memory at a time.

    Args:
        checkpoint: an open checkpoint.
        config: from `model_config`.
        dtype: of the parameters on the device.
        progress: called with a label, tensors done and tensors in all.

    Raises:
        CheckpointError: tensors are missing, surplus or misshapen; the message names them.
    """
    family = family_of(checkpoint.config)
    sources = family.sources(config)
    leaves = _leaves(sources)
    stored = _match_names(checkpoint, leaves, family)
    arrays = []
    for source in leaves:
        arrays.append(_load_leaf(checkpoint, source, stored, np.dtype(dtype)))
        if progress:
            progress("Loading weights", len(arrays), len(leaves))
    return jax.tree.unflatten(jax.tree.structure(sources, is_leaf=_is_source), arrays)


def _leaves(sources: Params) -> list[Source]:
    return jax.tree.leaves(sources, is_leaf=_is_source)


def _is_source(leaf: object) -> bool:
    return isinstance(leaf, Source)


def _load_leaf(checkpoint: Checkpoint, source: Source, stored: dict[str, str], dtype: np.dtype) -> jax.Array:
    out = _host_array(source.shape, dtype)
    start = 0
    for name, _ in source.parts:
        part = source.arrange(checkpoint.read(stored[name]))
        out[start : start + part.shape[0]] = part
        start += part.shape[0]
    return jax.block_until_ready(jax.device_put(out))  # else host copies pile up behind a slow link


def _host_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that the CPU device adopts as it is; one less aligned it would copy."""
    num_bytes = prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def _match_names(checkpoint: Checkpoint, leaves: Iterable[Source], family: Family) -> dict[str, str]:
    """Name in the checkpoint of every tensor the model needs; checks that they fit one to one."""
    shapes = checkpoint.tensor_shapes
    expected = {name: shape for source in leaves for name, shape in source.parts}
    stored = {name: _spelling(name, shapes, family) for name in expected}
    missing = [name for name, found in stored.items() if found is None]
    if missing:
        raise CheckpointError(f"{checkpoint.path} lacks {_some(missing)}; the file is incomplete or not this model's")
    found = {name: spelling for name, spelling in stored.items() if spelling is not None}
    misshapen = [
        f"{name} (expected {list(expected[name])}, got {list(shapes[spelling])})"
        for name, spelling in found.items()
        if tuple(shapes[spelling]) != expected[name]
    ]
    if misshapen:
        raise CheckpointError(f"{checkpoint.path} disagrees with its config.json on the shape of {_some(misshapen)}")
    inert = re.compile("|".join(family.inert_tensors) or r"(?!)")
    surplus = [name for name in set(shapes) - set(found.values()) if not inert.fullmatch(name)]
    if surplus:
        raise CheckpointError(
            f"{checkpoint.path} holds {_some(sorted(surplus))} that this architecture has no use for; "
            "its config.json does not describe it"
        )
    return found


def _spelling(name: str, shapes: Iterable[str], family: Family) -> str | None:
    """The name itself, or without a prefix that exporters of the bare model leave out."""
    spellings = [name, *(name.removeprefix(prefix) for prefix in family.prefixes)]
    return next((spelling for spelling in spellings if spelling in shapes), None)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{len(names)} tensor(s): {shown}" + (", ..." if len(names) > 4 else "")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Everything an engine is built from."""

    config: ModelConfig
    plan: MemoryPlan
    params: Params
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]


def load_model(model: str | Path, options: EngineConfig, *, progress: Progress | None = None) -> LoadedModel:
    """Find, plan and load a model.

    Raises:
        JaxinferError: it can't be found, read, understood or fitted.
    """
    path = resolve_model(model, progress=progress)
    with open_checkpoint(path) as checkpoint:
        config = model_config(checkpoint)
        plan = plan_model(checkpoint, config, options)
        tokenizer = load_tokenizer(path)
        return LoadedModel(
            config=config,
            plan=plan,
            params=load_params(checkpoint, config, dtype=plan.dtype, progress=progress),
            tokenizer=tokenizer,
            eos_ids=_eos_ids(checkpoint, tokenizer),
        )


def plan_model(checkpoint: Checkpoint, config: ModelConfig, options: EngineConfig) -> MemoryPlan:
    """Where the memory will go on the default device, before anything is loaded."""
    on_cpu = jax.default_backend() == "cpu"
    dtype = np.dtype(jnp.dtype(options.dtype or ("float32" if on_cpu else "bfloat16")))
    weight_bytes = num_parameters(config, family_of(checkpoint.config)) * dtype.itemsize
    return plan_memory(config, options, weight_bytes=weight_bytes, dtype=dtype, gather_context=on_cpu)


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[int, ...]:
    """generation_config.json wins over config.json, which wins over the tokenizer."""
    for eos in (checkpoint.generation_config.get("eos_token_id"), checkpoint.config.get("eos_token_id")):
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return tokenizer.eos_ids
