"""Paged attention in plain XLA: page blocks in a fixed order under an online softmax, for every platform.

Work follows the real lengths: loops end at the last page in use, and no more than one block of pages per row is
ever gathered at once.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CONTEXT_BLOCK = 128  # tokens of context gathered per row and iteration
QUERY_TILE = 256  # queries per iteration of prefill
MASKED = -1e30  # finite, so that a fully masked block leaves no NaN


class _Softmax(NamedTuple):
    """Running maximum, denominator and numerator of the softmax over the context read so far."""

    peak: Float[Array, "*rows"]
    total: Float[Array, "*rows"]
    weighted: Float[Array, "*rows H"]


def xla_paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P C K H"],
    v_pages: Float[Array, "P C K H"],
    block_table: Int[Array, "B M"],
    context_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B+1"] | None,
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "T N H"]:
    """See `paged_attention`."""
    pools = _Pools(k_pages, v_pages)
    if cu_q_lens is None:
        return _decode(q, pools, block_table, context_lens, scale=scale, window=window)
    return _prefill(q, pools, block_table, context_lens, cu_q_lens, scale=scale, window=window)


class _Pools(NamedTuple):
    k: Float[Array, "P C K H"]
    v: Float[Array, "P C K H"]


def _decode(
    q: Float[Array, "B N H"],
    pools: _Pools,
    block_table: Int[Array, "B M"],
    context_lens: Int[Array, " B"],
    *,
    scale: float,
    window: int | None,
) -> Float[Array, "B N H"]:
    """One query per row: all rows walk their pages together, a block of columns at a time."""
    num_rows, num_heads, head_dim = q.shape
    q_BKGH = _group(q * jnp.asarray(scale, q.dtype), pools)
    columns = _whole_blocks(block_table, pools)
    first = jnp.zeros_like(context_lens) if window is None else jnp.maximum(context_lens - window, 0)
    block_tokens = columns.shape[2] * pools.k.shape[1]

    def body(block: Int[Array, ""], state: _Softmax) -> _Softmax:
        positions = block * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
        visible_BS = (positions >= first[:, None]) & (positions < context_lens[:, None])
        k_BSKH, v_BSKH = _gather(pools, columns[:, block], visible_BS)
        scores = jnp.einsum("bkgh,bskh->bkgs", q_BKGH, k_BSKH, preferred_element_type=jnp.float32)
        return _accumulate(state, scores, visible_BS[:, None, None], v_BSKH, "bkgs,bskh->bkgh")

    start = _start(q_BKGH)
    blocks = (jnp.min(first) // block_tokens, -(-jnp.max(context_lens) // block_tokens))
    return _finish(jax.lax.fori_loop(*blocks, body, start), q.dtype).reshape(num_rows, num_heads, head_dim)


def _prefill(
    q: Float[Array, "T N H"],
    pools: _Pools,
    block_table: Int[Array, "B M"],
    context_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B+1"],
    *,
    scale: float,
    window: int | None,
) -> Float[Array, "T N H"]:
    """Ragged queries: tiles of one row's queries after another, each over the context that it can see."""
    num_tokens = q.shape[0]
    tile = min(QUERY_TILE, num_tokens)
    padded = jnp.pad(q * jnp.asarray(scale, q.dtype), ((0, tile), (0, 0), (0, 0)))  # the last tile may run over
    q_KGTH = _group(padded, pools).transpose(1, 2, 0, 3)
    columns = _whole_blocks(block_table, pools)

    def body(state: tuple[Int[Array, ""], Int[Array, ""], Array]) -> tuple[Int[Array, ""], Int[Array, ""], Array]:
        row, start, out_KGTH = state
        end = cu_q_lens[row + 1]
        position = context_lens[row] - (end - start)  # of the tile's first query
        q_tile = jax.lax.dynamic_slice_in_dim(q_KGTH, start, tile, axis=2)
        attended = _attend_tile(q_tile, pools, columns[row], position, context_lens[row], window)
        # A tile may run into the next row's tokens, which that row's own tiles then overwrite.
        out_KGTH = jax.lax.dynamic_update_slice_in_dim(out_KGTH, attended, start, axis=2)
        is_last = start + tile >= end
        return jnp.where(is_last, row + 1, row), jnp.where(is_last, end, start + tile), out_KGTH

    unfinished = lambda state: state[1] < cu_q_lens[-1]
    state = (jnp.int32(0), jnp.int32(0), jnp.zeros_like(q_KGTH))
    out = jax.lax.while_loop(unfinished, body, state)[2]
    return out.transpose(2, 0, 1, 3).reshape(padded.shape)[:num_tokens]


def _attend_tile(
    q_KGTH: Float[Array, "K G tile H"],
    pools: _Pools,
    columns: Int[Array, "blocks pages"],
    position: Int[Array, ""],
    context_len: Int[Array, ""],
    window: int | None,
) -> Float[Array, "K G tile H"]:
    """Queries at `position`, `position + 1`, ... over one row's pages."""
    num_kv_heads, groups, tile, head_dim = q_KGTH.shape
    block_tokens = columns.shape[1] * pools.k.shape[1]
    q_positions = position + jnp.tile(jnp.arange(tile, dtype=jnp.int32), groups)
    q_KQH = q_KGTH.reshape(num_kv_heads, groups * tile, head_dim)

    def body(block: Int[Array, ""], state: _Softmax) -> _Softmax:
        positions = block * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
        k_SKH, v_SKH = _gather(pools, columns[block], positions < context_len)
        visible_QS = _visible(q_positions, positions, context_len, window)
        scores = jnp.einsum("kqh,skh->kqs", q_KQH, k_SKH, preferred_element_type=jnp.float32)
        return _accumulate(state, scores, visible_QS, v_SKH, "kqs,skh->kqh")

    end = jnp.minimum(position + tile, context_len)
    begin = jnp.int32(0) if window is None else jnp.maximum(position + 1 - window, 0)
    blocks = (begin // block_tokens, -(-end // block_tokens))
    return _finish(jax.lax.fori_loop(*blocks, body, _start(q_KQH)), q_KGTH.dtype).reshape(q_KGTH.shape)


def _visible(
    q_positions: Int[Array, " Q"], positions: Int[Array, " S"], context_len: Int[Array, ""], window: int | None
) -> Bool[Array, "Q S"]:
    distance = q_positions[:, None] - positions
    visible = (distance >= 0) & (positions < context_len)
    return visible if window is None else visible & (distance < window)


def _group(x: Float[Array, "T N H"], pools: _Pools) -> Float[Array, "T K G H"]:
    return x.reshape(x.shape[0], pools.k.shape[2], -1, x.shape[2])


def _whole_blocks(block_table: Int[Array, "B M"], pools: _Pools) -> Int[Array, "B blocks pages"]:
    """Block table cut into runs of pages that hold a block of context, the last run padded with page 0."""
    pages = min(max(1, CONTEXT_BLOCK // pools.k.shape[1]), block_table.shape[1])
    padding = -block_table.shape[1] % pages
    return jnp.pad(block_table, ((0, 0), (0, padding))).reshape(block_table.shape[0], -1, pages)


def _gather(
    pools: _Pools, pages: Int[Array, "*rows pages"], visible: Bool[Array, "*rows S"]
) -> tuple[Float[Array, "*rows S K H"], Float[Array, "*rows S K H"]]:
    """Tokens of these pages; values no row may see are zeroed, since a NaN there would survive a zero weight."""
    read = lambda pool: pool.at[pages].get(mode="clip").reshape(*visible.shape, *pool.shape[2:])
    v = read(pools.v)
    return read(pools.k), jnp.where(visible[..., None, None], v, jnp.zeros_like(v))


def _start(q: Float[Array, "*rows H"]) -> _Softmax:
    rows = q.shape[:-1]
    full = partial(jnp.full, dtype=jnp.float32)
    return _Softmax(full(rows, MASKED), full(rows, 0.0), full(q.shape, 0.0))


def _accumulate(state: _Softmax, scores: Array, visible: Array, v: Array, weigh: str) -> _Softmax:
    """Fold one block of context into the running softmax. Source: Milakov & Gimelshein 2018 (arXiv 1805.02867)."""
    scores = jnp.where(visible, scores, jnp.float32(MASKED))
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - peak[..., None])
    fade = jnp.exp(state.peak - peak)
    weighted = jnp.einsum(weigh, weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return _Softmax(
        peak=peak,
        total=state.total * fade + jnp.sum(weights, axis=-1),
        weighted=state.weighted * fade[..., None] + weighted,
    )


def _finish(state: _Softmax, dtype: jnp.dtype) -> Array:
    """The attention output; zero for a query that saw nothing."""
    saw_any = (state.peak > MASKED)[..., None]
    total = jnp.where(saw_any, state.total[..., None], jnp.float32(1))
    return jnp.where(saw_any, state.weighted / total, jnp.float32(0)).astype(dtype)
