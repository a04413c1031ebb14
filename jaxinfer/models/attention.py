"""Self-attention of one decoder layer over whichever cache the step was given."""

from jaxtyping import Array, Float

from jaxinfer import ops
from jaxinfer.cache.pages import GatheredKV, KVCache, PagedKV, append_column, write_slots
from jaxinfer.config import ModelConfig
from jaxinfer.models.norms import normalize
from jaxinfer.models.rope import apply_rope
from jaxinfer.types import LayerParams, StepBatch

Rotation = tuple[Float[Array, "T 1 half"], Float[Array, "T 1 half"]]


def attention(
    x: Float[Array, "T D"],
    layer: LayerParams,
    kv: KVCache,
    batch: StepBatch,
    *,
    index: int,
    rotation: Rotation | None,
    config: ModelConfig,
) -> tuple[KVCache, Float[Array, "T D"]]:
    """Project, rotate, write this step's keys and values to the cache, attend, project back."""
    q, k, v = _project(x, layer, rotation, config)
    kv, attended = _write_and_attend(kv, q, k, v, batch, index=index, config=config)
    return kv, ops.linear(attended.reshape(x.shape[0], -1), layer.out)


def _project(
    x: Float[Array, "T D"], layer: LayerParams, rotation: Rotation | None, config: ModelConfig
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    heads = ops.linear(x, layer.qkv).reshape(x.shape[0], -1, config.head_dim)
    split = config.num_heads + config.num_kv_heads
    q, k, v = heads[:, : config.num_heads], heads[:, config.num_heads : split], heads[:, split:]
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = normalize(q, layer.q_norm, config=config), normalize(k, layer.k_norm, config=config)
    if rotation is not None:
        q, k = apply_rope(q, *rotation), apply_rope(k, *rotation)
    return q, k, v


def _write_and_attend(
    kv: KVCache,
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    batch: StepBatch,
    *,
    index: int,
    config: ModelConfig,
) -> tuple[KVCache, Float[Array, "T N H"]]:
    scale, window = config.attention_scale(index), config.window(index)
    match kv:
        case PagedKV():
            pages = write_slots(kv.layers[index], k, v, batch.slot_mapping)
            attended = ops.paged_attention(q, pages, batch, scale=scale, window=window)
            return kv._replace(layers=(*kv.layers[:index], pages, *kv.layers[index + 1 :])), attended
        case GatheredKV():
            columns = append_column(kv.layers[index], k, v, kv.column)
            attended = ops.gathered_attention(q, columns.k, columns.v, kv.starts, kv.column, scale=scale, window=window)
            return kv._replace(layers=(*kv.layers[:index], columns, *kv.layers[index + 1 :])), attended
