"""`paged_attention`: one entry for prefill chunks and decode on paged KV."""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.paged_attention.reference import reference_paged_attention
from pallas_kernels.paged_attention.xla import xla_paged_attention

IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "xla": xla_paged_attention,
    "reference": reference_paged_attention,
}


def paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P C K H"],
    v_pages: Float[Array, "P C K H"],
    block_table: Int[Array, "B M"],
    context_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B+1"] | None,
    *,
    scale: float,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of ragged queries over the pages of their sequences.

    Row b's queries are its last `cu_q_lens[b + 1] - cu_q_lens[b]` tokens, whose keys and values are already in the
    pages. Nothing outside a row's first `context_lens[b]` slots influences the result, NaN included.

    Args:
        q: flat queries, row-major; tokens past `cu_q_lens[-1]` are padding and yield anything finite.
        k_pages: keys; the pool, in which token t of row b lies in page `block_table[b, t // C]`, offset `t % C`.
        v_pages: values, laid out likewise.
        block_table: page ids; entries past a row's last page may hold any valid page.
        context_lens: tokens each row attends, its queries included; 0 marks a padding row.
        cu_q_lens: cumulative query lengths from 0; None when every row has exactly one query (decode).
        scale: multiplies q.k.
        window: tokens a query may look back on, itself included; None sees everything.
        implementation: None picks the best for the platform; a name is honoured or raises.

    Returns:
        Attention output in q's dtype; padding rows are zero.

    Raises:
        UnsupportedKernel: no such implementation.

    Source: Kwon et al. 2023 (arXiv 2309.06180) for paging; Dao et al. 2022 (arXiv 2205.14135) for the online softmax.
    """
    name = implementation or "xla"
    if name not in IMPLEMENTATIONS:
        raise UnsupportedKernel(f"implementation must be None or one of {sorted(IMPLEMENTATIONS)}, got {name!r}")
    return IMPLEMENTATIONS[name](q, k_pages, v_pages, block_table, context_lens, cu_q_lens, scale=scale, window=window)
