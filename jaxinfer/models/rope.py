"""Rotary position embedding and its context-extension variants."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.config import RopeConfig
from jaxinfer.errors import UnsupportedModelError


def rotation(
    positions: Int[Array, " T"], *, rope: RopeConfig
) -> tuple[Float[Array, "T 1 half"], Float[Array, "T 1 half"]]:
    """Cosines and sines of every rotated pair, shared by all layers of a step.

    Computed in a loop over two halves of the tokens: a loop's result is stored, while XLA:CPU would repeat plain
    sines in the fusions of every layer and head (5 % of a prefill of 1024 tokens).
    """

    def rotate(positions: Int[Array, " part"]) -> tuple[Float[Array, "part 1 half"], Float[Array, "part 1 half"]]:
        angles = positions.astype(jnp.float32)[:, None, None] * jnp.asarray(rope.inv_freq, jnp.float32)
        factor = jnp.float32(rope.attention_factor)
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor

    if positions.shape[0] % 2:
        return rotate(positions)
    cos, sin = jax.lax.map(rotate, positions.reshape(2, -1))
    return cos.reshape(-1, 1, cos.shape[-1]), sin.reshape(-1, 1, sin.shape[-1])


def apply_rope(
    x: Float[Array, "T heads H"], cos: Float[Array, "T 1 half"], sin: Float[Array, "T 1 half"]
) -> Float[Array, "T heads H"]:
    """Rotate the leading channels of every head, first half paired with second; further channels pass through.

    Source: Su et al. 2021 (arXiv 2104.09864), eq. 34, with GPT-NeoX's pairing of halves.
    """
    half = cos.shape[-1]
    x32 = x.astype(jnp.float32)
    first, second, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return rotated.astype(x.dtype)


def resolve_rope(
    hf: Mapping[str, Any], *, head_dim: int, default_theta: float = 10000.0, default_fraction: float | None = None
) -> RopeConfig:
    """Read a checkpoint's rope fields, transformers 4 or 5 spelling.

    Args:
        hf: the checkpoint's `config.json`.
        head_dim: channels per head.
        default_theta: the family's base where the file names none.
        default_fraction: rotated share of each head where the file names none; None: the family rotates whole heads.

    Raises:
        UnsupportedModelError: for a scaling type or field that is not implemented.
    """
    fields = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    kind = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
    fields.pop("type", None)
    given = (fields.pop("rope_theta", None), hf.get("rope_theta"), hf.get("rotary_emb_base"))
    theta = float(_first(*given, default_theta))
    rotary_dim = int(head_dim * _rotated_fraction(hf, fields, default_fraction))
    inv_freq = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if kind not in _SCALINGS:
        raise UnsupportedModelError(
            f"rope_type must be one of {', '.join(sorted(_SCALINGS))}, got {kind!r}; this model needs a scaling "
            "that jaxinfer does not implement"
        )
    original = "original_max_position_embeddings"  # at the top, as Phi-3 has it, or with the rest
    fields[original] = hf.get(original) or fields.get(original) or hf.get("max_position_embeddings")
    inv_freq, attention_factor = _SCALINGS[kind](inv_freq, fields, theta)
    fields.pop(original, None)
    if fields:
        raise UnsupportedModelError(
            f"rope_type {kind!r} has unknown fields {sorted(fields)}; they may change the numbers, so they are refused"
        )
    return RopeConfig(inv_freq=tuple(float(f) for f in inv_freq), attention_factor=float(attention_factor))


def _rotated_fraction(hf: Mapping[str, Any], fields: dict[str, Any], default: float | None) -> float:
    given = (fields.pop("partial_rotary_factor", None), hf.get("partial_rotary_factor"), hf.get("rotary_pct"))
    fraction = _first(*given, default or 1.0)
    if default is None and fraction != 1:
        raise UnsupportedModelError(f"partial_rotary_factor must be 1 for this architecture, got {fraction}")
    return float(fraction)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


# Each scaling takes (inv_freq, fields, theta), pops the fields it knows, returns (inv_freq, attention_factor).
Scaling = Callable[[np.ndarray, dict[str, Any], float], tuple[np.ndarray, float]]


def _default(inv_freq: np.ndarray, fields: dict[str, Any], theta: float) -> tuple[np.ndarray, float]:
    fields.pop("factor", None)  # written by some exporters, without effect on this type
    return inv_freq, 1.0


def _linear(inv_freq: np.ndarray, fields: dict[str, Any], theta: float) -> tuple[np.ndarray, float]:
    """Position interpolation. Source: Chen et al. 2023 (arXiv 2306.15595)."""
    return inv_freq / _take(fields, "linear", "factor"), 1.0


def _llama3(inv_freq: np.ndarray, fields: dict[str, Any], theta: float) -> tuple[np.ndarray, float]:
    """Slow frequencies divided by `factor`, fast ones kept, a linear blend between. Source: Llama 3.1's model code."""
    factor = _take(fields, "llama3", "factor")
    low, high = _take(fields, "llama3", "low_freq_factor"), _take(fields, "llama3", "high_freq_factor")
    turns = _take(fields, "llama3", "original_max_position_embeddings") * inv_freq / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inv_freq * (blend + (1 - blend) / factor), 1.0


def _yarn(inv_freq: np.ndarray, fields: dict[str, Any], theta: float) -> tuple[np.ndarray, float]:
    """NTK-by-parts interpolation with attention temperature. Source: Peng et al. 2023 (arXiv 2309.00071), eq. 19-23."""
    factor = _take(fields, "yarn", "factor")
    original = _take(fields, "yarn", "original_max_position_embeddings")
    fast, slow = fields.pop("beta_fast", None) or 32.0, fields.pop("beta_slow", None) or 1.0
    truncate = fields.pop("truncate", True)
    num_pairs = len(inv_freq)

    def pair_with(turns: float) -> float:
        """Index of the pair that makes this many turns over the original context."""
        return num_pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    start, end = pair_with(fast), pair_with(slow)
    if truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, 2 * num_pairs - 1)
    ramp = np.clip((np.arange(num_pairs) - start) / ((end - start) or 0.001), 0.0, 1.0)
    scaled = inv_freq * (1 - ramp) + inv_freq / factor * ramp
    return scaled, _yarn_attention_factor(fields, factor)


def _yarn_attention_factor(fields: dict[str, Any], factor: float) -> float:
    explicit = fields.pop("attention_factor", None)
    mscale, mscale_all = fields.pop("mscale", None), fields.pop("mscale_all_dim", None)
    if explicit is not None:
        return explicit
    temperature = lambda scale: 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
    if mscale and mscale_all:
        return temperature(mscale) / temperature(mscale_all)
    return temperature(1.0)


def _frequency_factors(inv_freq: np.ndarray, fields: dict[str, Any], theta: float) -> tuple[np.ndarray, float]:
    """Divisors per frequency, as GGUF files store Llama 3's scaling (`rope_freqs.weight`)."""
    return inv_freq / np.asarray(_take(fields, "frequency_factors", "factors"), np.float64), 1.0


def _take(fields: dict[str, Any], kind: str, name: str) -> Any:
    value = fields.pop(name, None)
    if value is None:
        raise UnsupportedModelError(f"rope_type {kind!r} needs the field {name!r}, which the config does not give")
    return value


_SCALINGS: dict[str, Scaling] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "frequency_factors": _frequency_factors,
}
