"""The one decoder every family is data for."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer import ops
from jaxinfer.cache.pages import KVCache
from jaxinfer.config import ModelConfig
from jaxinfer.models.attention import Rotation, attention
from jaxinfer.models.mlp import mlp
from jaxinfer.models.norms import normalize
from jaxinfer.models.rope import rotation
from jaxinfer.types import LayerParams, Linear, Params, StepBatch


def forward(
    params: Params, kv: KVCache, batch: StepBatch, *, config: ModelConfig
) -> tuple[KVCache, Float[Array, "T D"]]:
    """Run the step's tokens through every layer, writing their keys and values to the cache.

    Returns:
        The updated cache, and each token's hidden state after the final norm.
    """
    x = _embed(params, batch, config)
    rotated = rotation(batch.positions, rope=config.rope) if config.rope else None
    for index, layer in enumerate(params.layers):
        with jax.named_scope(f"layer_{index}"):
            kv, x = _block(x, layer, kv, batch, index=index, rotated=rotated, config=config)
    if params.final_norm is not None:
        x = normalize(x, params.final_norm, config=config)
    return kv, x


def logits(params: Params, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
    """Next-token logits in float32."""
    if params.project_out is not None:
        hidden = ops.linear(hidden, params.project_out)
    head = Linear(params.embed) if params.head is None else params.head
    with jax.named_scope("head"):
        return ops.linear(hidden, head).astype(jnp.float32)


def _embed(params: Params, batch: StepBatch, config: ModelConfig) -> Float[Array, "T D"]:
    x = params.embed.at[batch.token_ids].get(mode="fill", fill_value=0)
    if params.project_in is not None:
        x = ops.linear(x, params.project_in)
    if params.positions is not None:
        rows = batch.positions + config.position_offset
        x = x + params.positions.at[rows].get(mode="fill", fill_value=0)
    return x


def _block(
    x: Float[Array, "T D"],
    layer: LayerParams,
    kv: KVCache,
    batch: StepBatch,
    *,
    index: int,
    rotated: Rotation | None,
    config: ModelConfig,
) -> tuple[KVCache, Float[Array, "T D"]]:
    """Attention and MLP around the residual stream.

    `pre`: x + f(norm(x)). `post`: norm(x + f(x)) (OPT-350m). `parallel`: x + attention(norm(x)) + mlp(norm'(x)).
    """
    norm_before = config.residual != "post"
    attend_input = normalize(x, layer.attn_norm, config=config) if norm_before else x
    with jax.named_scope("attention"):
        kv, attended = attention(attend_input, layer, kv, batch, index=index, rotation=rotated, config=config)
    if config.residual == "parallel":
        return kv, x + attended + mlp(normalize(x, layer.mlp_norm, config=config), layer, config=config)
    x = x + attended
    if not norm_before:
        x = normalize(x, layer.attn_norm, config=config)
    with jax.named_scope("mlp"):
        x = x + mlp(normalize(x, layer.mlp_norm, config=config) if norm_before else x, layer, config=config)
    return kv, x if norm_before else normalize(x, layer.mlp_norm, config=config)
