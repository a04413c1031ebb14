"""The feed-forward block, plain or gated."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer import ops
from jaxinfer.config import ModelConfig
from jaxinfer.types import LayerParams

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def mlp(x: Float[Array, "T D"], layer: LayerParams, *, config: ModelConfig) -> Float[Array, "T D"]:
    """`down(act(up(x)))`, or `down(act(gate(x)) * up(x))` when gated. Source: Shazeer 2020 (arXiv 2002.05202)."""
    activation = ACTIVATIONS[config.activation]
    hidden = ops.linear(x, layer.up)
    if config.gated_mlp:
        gate, up = jnp.split(hidden, 2, axis=-1)
        hidden = activation(gate) * up
    else:
        hidden = activation(hidden)
    return ops.linear(hidden, layer.down)
