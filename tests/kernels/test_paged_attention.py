"""Every implementation against the float32 definition, over pools in which whatever must not be read is NaN."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedKernel, gathered_attention, paged_attention
from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.api import IMPLEMENTATIONS

TOLERANCES = {
    jnp.float32: 2e-5,  # sums of a few hundred terms of size one, in another order
    jnp.bfloat16: 2e-2,  # weights and output rounded to 8 bits of mantissa
}
FAST = sorted(IMPLEMENTATIONS.keys() - {"reference"})


class Case(NamedTuple):
    """Arguments of `paged_attention`."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    block_table: jax.Array
    context_lens: jax.Array
    cu_q_lens: jax.Array | None


def make_case(
    query_lens,
    context_lens,
    *,
    heads=(4, 2),
    head_dim=16,
    page_size=16,
    padding_tokens=0,
    padding_rows=0,
    decode=False,
    dtype=jnp.float32,
    seed=0,
) -> Case:
    """Random rows on scattered pages; unused slots are NaN, and the table's tail names pages that are full of it."""
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    used = [-(-length // page_size) for length in context_lens]
    num_rows, max_pages, num_pages = len(context_lens) + padding_rows, max(used) + 2, sum(used) + 3
    order = rng.permutation(num_pages)
    table = np.full((num_rows, max_pages), order[-1], np.int32)
    pools = np.full((2, num_pages, page_size, num_kv_heads, head_dim), np.nan, np.float32)
    start = 0
    for row, (count, length) in enumerate(zip(used, context_lens, strict=True)):
        table[row, :count] = order[start : start + count]
        start += count
        filled = np.full((2, count * page_size, num_kv_heads, head_dim), np.nan, np.float32)
        filled[:, :length] = rng.normal(size=(2, length, num_kv_heads, head_dim))
        pools[:, table[row, :count]] = filled.reshape(2, count, page_size, num_kv_heads, head_dim)
    bounds = np.concatenate([[0], np.cumsum(query_lens), [sum(query_lens)] * padding_rows]).astype(np.int32)
    num_tokens = num_rows if decode else int(bounds[-1]) + padding_tokens
    q = rng.normal(size=(num_tokens, num_heads, head_dim))
    lens = np.asarray([*context_lens, *[0] * padding_rows], np.int32)
    q, k, v = (jnp.asarray(x, jnp.float32).astype(dtype) for x in (q, *pools))
    return Case(q, k, v, jnp.asarray(table), jnp.asarray(lens), None if decode else jnp.asarray(bounds))


@partial(jax.jit, static_argnames=("scale", "window", "implementation"))
def _jitted(*case, scale, window, implementation):
    return paged_attention(*case, scale=scale, window=window, implementation=implementation)


def assert_matches_reference(case: Case, implementation, *, window=None, scale=0.3):
    actual = _jitted(*case, scale=scale, window=window, implementation=implementation)
    expected = paged_attention(*case, scale=scale, window=window, implementation="reference")
    assert actual.dtype == case.q.dtype and actual.shape == case.q.shape
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    assert np.isfinite(actual).all()
    real = slice(0, None if case.cu_q_lens is None else int(case.cu_q_lens[-1]))
    tolerance = TOLERANCES[case.q.dtype.type]
    np.testing.assert_allclose(actual[real], expected[real], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("implementation", FAST)
class TestAgainstReference:
    @pytest.mark.parametrize("heads", [(3, 3), (3, 1), (6, 2)])
    @pytest.mark.parametrize("head_dim", [64, 80])
    @pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
    def test_head_shapes(self, heads, head_dim, decode, implementation):
        lens = [1, 1, 1] if decode else [5, 1, 7]
        case = make_case(lens, [5, 18, 33], heads=heads, head_dim=head_dim, decode=decode)
        assert_matches_reference(case, implementation, scale=head_dim**-0.5)

    @pytest.mark.parametrize("page_size", [1, 2, 7, 16])
    @pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
    def test_page_sizes(self, page_size, decode, implementation):
        lens = [1, 1, 1] if decode else [3, 15, 2]
        assert_matches_reference(make_case(lens, [3, 15, 20], page_size=page_size, decode=decode), implementation)

    @pytest.mark.parametrize("window", [1, 3, 16, 17, 1000])
    @pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
    def test_windows(self, window, decode, implementation):
        lens = [1, 1, 1] if decode else [20, 1, 6]
        assert_matches_reference(make_case(lens, [20, 31, 300], decode=decode), implementation, window=window)

    @pytest.mark.parametrize("query_lens", [[1, 16, 17], [34, 1, 1], [2, 0, 30]])
    def test_ragged_rows_with_padding_tokens_and_rows(self, query_lens, implementation):
        context_lens = [length + extra for length, extra in zip(query_lens, (0, 9, 16), strict=True)]
        case = make_case(query_lens, context_lens, padding_tokens=5, padding_rows=2)
        assert_matches_reference(case, implementation)

    @pytest.mark.parametrize("window", [None, 100])
    def test_rows_that_straddle_tiles_and_blocks(self, window, implementation):
        query_lens = [xla.QUERY_TILE - 3, 2 * xla.QUERY_TILE + 5, 7]
        context_lens = [xla.QUERY_TILE - 3, 2 * xla.QUERY_TILE + 5 + xla.CONTEXT_BLOCK, xla.CONTEXT_BLOCK + 8]
        case = make_case(query_lens, context_lens, padding_tokens=9)
        assert_matches_reference(case, implementation, window=window)

    @pytest.mark.parametrize("length", [xla.CONTEXT_BLOCK - 1, xla.CONTEXT_BLOCK, xla.CONTEXT_BLOCK + 1])
    def test_decode_around_block_boundaries(self, length, implementation):
        case = make_case([1, 1], [length, 3 * xla.CONTEXT_BLOCK - length], padding_rows=1, decode=True)
        assert_matches_reference(case, implementation)
        assert_matches_reference(case, implementation, window=xla.CONTEXT_BLOCK)

    @pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
    def test_bfloat16(self, decode, implementation):
        lens = [1, 1] if decode else [40, 3]
        assert_matches_reference(make_case(lens, [40, 200], decode=decode, dtype=jnp.bfloat16), implementation)

    def test_large_scores_do_not_overflow(self, implementation):
        case = make_case([6, 2], [6, 40])
        assert_matches_reference(case._replace(q=case.q * 20), implementation, scale=4.0)

    @pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
    def test_two_runs_agree_bit_for_bit(self, decode, implementation):
        case = make_case([1, 1] if decode else [40, 3], [40, 200], decode=decode)
        one, other = (_jitted(*case, scale=0.3, window=None, implementation=implementation) for _ in range(2))
        np.testing.assert_array_equal(one, other)

    def test_padding_rows_are_zero_and_all_padding_is_allowed(self, implementation):
        case = make_case([1], [20], padding_rows=2, decode=True)
        run = partial(_jitted, scale=0.3, window=None, implementation=implementation)
        assert not np.asarray(run(*case)[1:]).any()
        assert not np.asarray(run(*case._replace(context_lens=jnp.zeros(3, jnp.int32)))).any()


def test_rows_do_not_depend_on_their_neighbours():
    case = make_case([5, 9, 3], [5, 30, 50])
    together = _jitted(*case, scale=0.3, window=None, implementation=None)
    for row, (start, end) in enumerate([(0, 5), (5, 14), (14, 17)]):
        bounds = jnp.asarray([0, end - start], jnp.int32)
        own = slice(row, row + 1)
        alone = case._replace(
            q=case.q[start:end], block_table=case.block_table[own], context_lens=case.context_lens[own]
        )
        out = _jitted(*alone._replace(cu_q_lens=bounds), scale=0.3, window=None, implementation=None)
        np.testing.assert_allclose(together[start:end], out, rtol=0, atol=TOLERANCES[jnp.float32])


def test_reference_is_plain_softmax_attention():
    """The definition itself, on one row whose pages lie in order."""
    case = make_case([6], [6], heads=(2, 2), page_size=6)
    page = int(case.block_table[0, 0])
    k, v = case.k_pages[page], case.v_pages[page]
    scores = jnp.einsum("tnh,snh->nts", case.q, k) * 0.5
    scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, -jnp.inf)
    expected = jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores), v)
    out = paged_attention(*case, scale=0.5, implementation="reference")
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_unknown_implementation_is_named():
    with pytest.raises(UnsupportedKernel, match="no-such-kernel"):
        paged_attention(*make_case([2], [2]), scale=1.0, implementation="no-such-kernel")


@pytest.mark.parametrize("heads", [(4, 4), (3, 1)])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("window", [None, 1, 7, 20])
def test_gathered_attention_matches_reference(heads, head_dim, window):
    lens, room, step, page_size = [1, 18, 33], 4, 2, 16
    case = make_case([1] * 3, lens, heads=heads, head_dim=head_dim, decode=True)
    last = 48 + step  # of 48 columns of context and 4 of room, two steps in
    starts = np.array([last + 1 - length for length in lens], np.int32)
    k = np.zeros((3, heads[1], head_dim, 48 + room), np.float32)
    v = np.full((3, heads[1], 48 + room, head_dim), 1e6, np.float32)  # finite, as promised, but loud
    for row, length in enumerate(lens):
        pages = np.asarray(case.block_table[row, : -(-length // page_size)])
        tokens = [np.asarray(pool)[pages].reshape(-1, heads[1], head_dim)[:length] for pool in case[1:3]]
        k[row, :, :, starts[row] : last + 1] = tokens[0].transpose(1, 2, 0)
        v[row, :, starts[row] : last + 1] = tokens[1].transpose(1, 0, 2)
    arrays = (case.q, *map(jnp.asarray, (k, v, starts)), jnp.int32(last))
    out = jax.jit(partial(gathered_attention, scale=0.3, window=window))(*arrays)
    expected = paged_attention(*case, scale=0.3, window=window, implementation="reference")
    np.testing.assert_allclose(out, expected, rtol=TOLERANCES[jnp.float32], atol=TOLERANCES[jnp.float32])
