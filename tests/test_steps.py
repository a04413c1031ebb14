"""The jitted steps: pages are donated and never copied, and runs of steps equal single steps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache.pages import init_pages
from jaxinfer.io.checkpoint import open_checkpoint
from jaxinfer.load import load_params, model_config
from jaxinfer.steps import decode_step, gather_step, prefill_step
from jaxinfer.types import SamplingBatch, SamplingRows, StepBatch

NUM_PAGES, PAGE_SIZE = 512, 16
POOL_BYTES = 2 * 2 * NUM_PAGES * PAGE_SIZE * 2 * 8 * 4  # k and v, layers, slots, kv heads, head dim, float32


@pytest.fixture(scope="module")
def model(tiny):
    with open_checkpoint(tiny("llama")) as checkpoint:
        config = model_config(checkpoint)
        return load_params(checkpoint, config, dtype=np.dtype(np.float32)), config


@pytest.fixture
def kv(model):
    return init_pages(model[1], num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=np.dtype(np.float32))


def sampling(num_rows: int, *, vocab_size: int, **fields) -> SamplingBatch:
    rows = SamplingRows(
        keys=jax.random.split(jax.random.key(0), num_rows),
        temperature=jnp.zeros(num_rows),
        top_k=jnp.full(num_rows, vocab_size, jnp.int32),
        top_p=jnp.ones(num_rows),
        min_p=jnp.zeros(num_rows),
    )
    defaults = SamplingBatch(
        rows=rows,
        stop_ids=jnp.full((num_rows, 8), vocab_size, jnp.int32),
        num_outputs=jnp.ones(num_rows, jnp.int32),
        min_tokens=jnp.zeros(num_rows, jnp.int32),
        max_tokens=jnp.full(num_rows, 100, jnp.int32),
        edits=None,
        history=None,
        prompt_lens=None,
    )
    return defaults._replace(**fields)


def decode_batch(num_rows: int, context: int) -> StepBatch:
    """Rows on shuffled pages, each about to write its token `context`."""
    pages = np.random.default_rng(0).permutation(NUM_PAGES)[: num_rows * 8].reshape(num_rows, 8)
    full = partial(jnp.full, num_rows, dtype=jnp.int32)
    return StepBatch(full(5), full(context - 1), full(0), jnp.asarray(pages, jnp.int32), full(context), None)


def prefill_batch(num_tokens: int) -> StepBatch:
    span = jnp.arange(num_tokens, dtype=jnp.int32)
    table = jnp.arange(8, dtype=jnp.int32)[None]
    lens = jnp.array([num_tokens], jnp.int32)
    return StepBatch(4 + span, span, span, table, lens, jnp.array([0, num_tokens], jnp.int32))


def copy_context(kv, batch: StepBatch):
    return gather_step(kv, batch.block_table, batch.context_lens - 1, num_columns=128)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_decode_updates_the_donated_pool_in_place(model, kv, num_rows, gather):
    params, config = model
    batch = decode_batch(num_rows, 20)
    gathered = copy_context(kv, batch) if gather else None
    inputs = gathered, batch, sampling(num_rows, vocab_size=config.vocab_size), jnp.int32(4)
    run = partial(decode_step, config=config, max_steps=4)
    memory = decode_step.lower(params, kv, *inputs, **run.keywords).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= POOL_BYTES
    assert memory.temp_size_in_bytes < POOL_BYTES / 4
    new_kv, new_gathered, _ = run(params, kv, *inputs)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((kv, gathered)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, new_kv, new_gathered)))


def test_prefill_updates_the_donated_pool_in_place(model, kv):
    params, config = model
    inputs = prefill_batch(32), sampling(1, vocab_size=config.vocab_size), jnp.zeros(32, jnp.int32)
    memory = prefill_step.lower(params, kv, *inputs, config=config).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= POOL_BYTES
    assert memory.temp_size_in_bytes < POOL_BYTES / 4
    prefill_step(params, kv, *inputs, config=config)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(kv))


def decode(model, kv, *, num_rows=3, num_steps=6, gather=True, **fields):
    """A run of steps over contexts of 19 zeros."""
    params, config = model
    batch = decode_batch(num_rows, 20)
    kv, _, out = decode_step(
        params,
        kv,
        copy_context(kv, batch) if gather else None,
        batch,
        sampling(num_rows, vocab_size=config.vocab_size, **fields),
        jnp.int32(num_steps),
        config=config,
        max_steps=8,
    )
    return kv, out


def test_reading_a_copy_equals_reading_pages(model, kv):
    copied, from_copy = decode(model, kv)
    fresh = init_pages(model[1], num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=np.dtype(np.float32))
    paged, from_pages = decode(model, fresh, gather=False)
    np.testing.assert_array_equal(from_copy.ids[:, :6], from_pages.ids[:, :6])
    for left, right in zip(jax.tree.leaves(copied), jax.tree.leaves(paged), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_rows_end_at_their_limit_and_at_stop_ids(model, kv):
    _, free = decode(model, kv)
    third = int(free.ids[1, 2])
    stop_ids = jnp.full((3, 8), model[1].vocab_size, jnp.int32).at[1, 0].set(third)
    fresh = init_pages(model[1], num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=np.dtype(np.float32))
    _, out = decode(model, fresh, stop_ids=stop_ids, max_tokens=jnp.array([3, 100, 0], jnp.int32))
    first_hit = free.ids[1].tolist().index(third) + 1
    assert out.num_tokens.tolist() == [2, first_hit, 0]
    assert out.ids[0, :2].tolist() == free.ids[0, :2].tolist()


def test_finished_rows_write_nothing_more(model, kv):
    """A row may own just the pages that its limit needs; beyond it lies somebody else's."""
    before = jax.tree.map(np.asarray, kv)
    after, out = decode(model, kv, max_tokens=jnp.array([2, 2, 0], jnp.int32))
    assert out.num_tokens.tolist() == [1, 1, 0]
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        written = (np.asarray(new) != old).any(axis=(2, 3))
        assert written.sum() == 2  # one slot in each of the first two rows' pages


def test_a_copy_carries_over_from_run_to_run(model, kv):
    params, config = model
    _, once = decode(model, kv, num_steps=8)
    fresh = init_pages(config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=np.dtype(np.float32))
    batch, ids = decode_batch(3, 20), []
    gathered = copy_context(fresh, batch)
    for _ in range(2):
        fresh, gathered, out = decode_step(
            params,
            fresh,
            gathered,
            batch,
            sampling(3, vocab_size=config.vocab_size),
            jnp.int32(4),
            config=config,
            max_steps=8,
        )
        ids.append(out.ids[:, :4])
        batch = batch._replace(token_ids=out.ids[:, 3], context_lens=batch.context_lens + 4)
    np.testing.assert_array_equal(np.concatenate(ids, axis=1), once.ids)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_steps_lower_for_accelerators(model, kv, platform):
    params, config = model
    inputs = prefill_batch(32), sampling(1, vocab_size=config.vocab_size), jnp.zeros(32, jnp.int32)
    prefill = prefill_step.trace(params, kv, *inputs, config=config)
    inputs = None, decode_batch(4, 20), sampling(4, vocab_size=config.vocab_size), jnp.int32(4)
    decode = decode_step.trace(params, kv, *inputs, config=config, max_steps=8)
    for traced in (prefill, decode):
        assert "optimization_barrier" not in traced.lower(lowering_platforms=(platform,)).as_text()  # CPU's products
