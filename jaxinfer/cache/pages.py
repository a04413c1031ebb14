"""The KV cache on the device: pages, and the per-batch copy of them that a run of decode steps reads on CPU."""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.config import ModelConfig


class PagedLayer(NamedTuple):
    """One layer's pool. A token's slot is `page * C + offset`."""

    k: Float[Array, "P C K H"]
    v: Float[Array, "P C K H"]


class PagedKV(NamedTuple):
    """The preallocated pool of every layer; donated to each step and updated in place."""

    layers: tuple[PagedLayer, ...]

    @property
    def num_slots(self) -> int:
        """Slots in the pool; the value that pads `slot_mapping`."""
        return self.layers[0].k.shape[0] * self.layers[0].k.shape[1]


class GatheredLayer(NamedTuple):
    """One layer's tokens of one batch, copied out of the pages; `k` has tokens on the minor axis."""

    k: Float[Array, "B K H S"]
    v: Float[Array, "B K S H"]


class GatheredKV(NamedTuple):
    """A batch's context side by side: rows end at the same column, so that every row's next token has one place.

    XLA:CPU gathers at 8 GB/s and multiplies at 40: copying the context once, and reading the copy for as long as
    the same rows decode, makes attention at batch 32 three times cheaper than gathering pages in every step.
    """

    layers: tuple[GatheredLayer, ...]
    starts: Int[Array, " B"]  # first valid column of each row
    column: Int[Array, ""]  # where the next token goes

    @property
    def num_columns(self) -> int:
        """Context and room for new tokens."""
        return self.layers[0].v.shape[2]


KVCache = TypeVar("KVCache", PagedKV, GatheredKV)  # a step reads and returns the kind it was given


def init_pages(config: ModelConfig, *, num_pages: int, page_size: int, dtype: jnp.dtype) -> PagedKV:
    """A zeroed pool for `num_pages` pages of `page_size` tokens in every layer."""
    shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
    make = lambda: PagedLayer(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))
    return PagedKV(layers=tuple(make() for _ in range(config.num_layers)))


def write_slots(
    pages: PagedLayer, k: Float[Array, "T K H"], v: Float[Array, "T K H"], slot_mapping: Int[Array, " T"]
) -> PagedLayer:
    """Put token t's key and value at `slot_mapping[t]`; slots out of the pool are dropped."""
    return PagedLayer(k=_scatter(pages.k, k, slot_mapping), v=_scatter(pages.v, v, slot_mapping))


def _scatter(
    pool: Float[Array, "P C K H"], rows: Float[Array, "T K H"], slots: Int[Array, " T"]
) -> Float[Array, "P C K H"]:
    flat = pool.reshape(-1, *pool.shape[2:])
    if slots.shape[0] == 1:  # XLA turns a one-row scatter that may drop into a select over two whole pools
        slots = jnp.append(slots, jnp.asarray(flat.shape[0], slots.dtype))
        rows = jnp.repeat(rows, 2, axis=0)
    return flat.at[slots].set(rows.astype(pool.dtype), mode="drop").reshape(pool.shape)


def gather_context(
    kv: PagedKV, block_table: Int[Array, "B M"], context_lens: Int[Array, " B"], *, num_columns: int
) -> GatheredKV:
    """Copy each row's committed tokens out of the pages, flush right at the longest row's length.

    Args:
        kv: the pool.
        block_table: pages of each row.
        context_lens: committed tokens of each row, fewer than `num_columns`.
        num_columns: width of the copy; what the longest row leaves is room for new tokens.
    """
    page_size = kv.layers[0].k.shape[1]
    column = jnp.max(context_lens)
    starts = column - context_lens
    tokens = jnp.arange(num_columns, dtype=jnp.int32) - starts[:, None]
    is_committed = (tokens >= 0) & (tokens < context_lens[:, None])
    pages = jnp.take_along_axis(block_table, jnp.maximum(tokens, 0) // page_size, axis=1, mode="clip")
    slots = jnp.where(is_committed, pages * page_size + tokens % page_size, kv.num_slots)
    layers = tuple(_gather_layer(layer, slots) for layer in kv.layers)
    return GatheredKV(layers=layers, starts=starts, column=column)


def _gather_layer(layer: PagedLayer, slots: Int[Array, "B S"]) -> GatheredLayer:
    def gather(pool: Float[Array, "P C K H"]) -> Float[Array, "B S K H"]:
        return pool.reshape(-1, *pool.shape[2:]).at[slots].get(mode="fill", fill_value=0)

    return GatheredLayer(k=gather(layer.k).transpose(0, 2, 3, 1), v=gather(layer.v).transpose(0, 2, 1, 3))


def append_column(
    layer: GatheredLayer, k: Float[Array, "B K H"], v: Float[Array, "B K H"], column: Int[Array, ""]
) -> GatheredLayer:
    """Put one new token of every row at `column`."""
    return GatheredLayer(
        k=jax.lax.dynamic_update_slice_in_dim(layer.k, k[..., None].astype(layer.k.dtype), column, axis=3),
        v=jax.lax.dynamic_update_slice_in_dim(layer.v, v[:, :, None].astype(layer.v.dtype), column, axis=2),
    )


def commit_columns(kv: PagedKV, gathered: GatheredKV, first: Int[Array, ""], slots: Int[Array, "B J"]) -> PagedKV:
    """Write columns `first` to `first + J - 1`, what a run of decode steps added, to their slots in the pool."""
    num_new = slots.shape[1]
    layers = []
    for pages, columns in zip(kv.layers, gathered.layers, strict=True):
        k = jax.lax.dynamic_slice_in_dim(columns.k, first, num_new, axis=3).transpose(0, 3, 1, 2)
        v = jax.lax.dynamic_slice_in_dim(columns.v, first, num_new, axis=2).transpose(0, 2, 1, 3)
        flat = lambda rows: rows.reshape(-1, *rows.shape[2:])
        layers.append(write_slots(pages, flat(k), flat(v), slots.reshape(-1)))
    return PagedKV(layers=tuple(layers))
