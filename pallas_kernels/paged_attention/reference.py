"""The definition of paged attention, in float32 and plain loops; what every implementation is tested against."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def reference_paged_attention(
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
    """See `paged_attention`; runs on the host, outside jit."""
    num_rows = block_table.shape[0]
    bounds = np.arange(num_rows + 1) if cu_q_lens is None else np.asarray(cu_q_lens)
    out = np.zeros(q.shape, np.float32)
    for row in range(num_rows):
        length, start, end = int(context_lens[row]), int(bounds[row]), int(bounds[row + 1])
        if length == 0:
            continue
        k, v = (_row_tokens(pages, block_table[row], length) for pages in (k_pages, v_pages))
        for token in range(start, end):
            position = length - (end - token)
            first = 0 if window is None else max(0, position + 1 - window)
            seen = slice(first, position + 1)
            out[token] = _attend(np.asarray(q[token], np.float32), k[seen], v[seen], scale)
    return jnp.asarray(out, q.dtype)


def _row_tokens(pages: Float[Array, "P C K H"], table: Int[Array, " M"], length: int) -> np.ndarray:
    tokens = np.asarray(pages, np.float32)[np.asarray(table)]
    return tokens.reshape(-1, *pages.shape[2:])[:length]


def _attend(q_NH: np.ndarray, k_SKH: np.ndarray, v_SKH: np.ndarray, scale: float) -> np.ndarray:
    groups = q_NH.shape[0] // k_SKH.shape[1]
    k_SNH, v_SNH = (np.repeat(x, groups, axis=1) for x in (k_SKH, v_SKH))
    scores_NS = np.einsum("nh,snh->ns", q_NH, k_SNH) * scale
    weights_NS = np.exp(scores_NS - scores_NS.max(axis=-1, keepdims=True))
    return np.einsum("ns,snh->nh", weights_NS / weights_NS.sum(axis=-1, keepdims=True), v_SNH)
