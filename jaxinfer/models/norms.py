"""Normalisation layers, computed in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.config import ModelConfig
from jaxinfer.types import Norm


def normalize(x: Float[Array, "*batch width"], norm: Norm, *, config: ModelConfig) -> Float[Array, "*batch width"]:
    """The model's RMSNorm or LayerNorm over the last axis.

    Source: Zhang & Sennrich 2019 (arXiv 1910.07467); Ba et al. 2016 (arXiv 1607.06450).
    """
    x32 = x.astype(jnp.float32)
    if config.norm == "layer":
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normed = x32 * jax.lax.rsqrt(variance + jnp.float32(config.norm_eps)) * norm.scale.astype(jnp.float32)
    if norm.bias is not None:
        normed = normed + norm.bias.astype(jnp.float32)
    return normed.astype(x.dtype)
