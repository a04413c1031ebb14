"""Decode attention over a context already copied out of its pages, for platforms without a paged kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MASKED = -1e30


def gathered_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H S"],
    v: Float[Array, "B K S H"],
    starts: Int[Array, " B"],
    column: Int[Array, ""],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "B N H"]:
    """One query per row over columns `starts[b]` to `column` of its context.

    Args:
        q: queries.
        k: keys, tokens on the minor axis: the layout in which XLA:CPU vectorises both products.
        v: values; columns outside a row's range must be finite.
        starts: first column of each row.
        column: the queries' own column, the same in every row.
        scale: multiplies q.k.
        window: tokens a query may look back on, itself included.

    Returns:
        Attention output in q's dtype.
    """
    num_rows, _, head_dim = q.shape
    q_BKGH = (q * jnp.asarray(scale, q.dtype)).reshape(num_rows, k.shape[1], -1, head_dim)
    scores = jnp.einsum("bkgh,bkhs->bkgs", q_BKGH, k, preferred_element_type=jnp.float32)
    columns = jnp.arange(k.shape[3], dtype=jnp.int32)
    visible = (columns >= starts[:, None]) & (columns <= column)
    if window is not None:
        visible &= columns > column - window
    scores = jnp.where(visible[:, None, None], scores, jnp.float32(MASKED))
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("bkgs,bksh->bkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return (out / total).astype(q.dtype).reshape(q.shape)
