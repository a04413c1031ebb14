"""The pool is written in place, only where it should be, and costs what the plan says."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache.pages import (
    PagedKV,
    PagedLayer,
    append_column,
    commit_columns,
    gather_context,
    init_pages,
    write_slots,
)
from jaxinfer.models.decoder import forward
from jaxinfer.models.registry import Source, family_of
from jaxinfer.types import StepBatch

FLOAT32 = jnp.dtype(jnp.float32)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
}
OPT_13B = {
    "model_type": "opt",
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "ffn_dim": 20480,
    "hidden_size": 5120,
    "max_position_embeddings": 2048,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "vocab_size": 50272,
    "word_embed_proj_dim": 5120,
}


def translate(hf):
    return family_of(hf).translate(hf)


def numbered(*shape: int, start: int = 0) -> jax.Array:
    return jnp.arange(start, start + np.prod(shape), dtype=jnp.float32).reshape(shape)


def test_pool_has_a_page_array_per_layer():
    kv = init_pages(translate(LLAMA), num_pages=6, page_size=4, dtype=jnp.dtype(jnp.bfloat16))
    assert len(kv.layers) == 2 and kv.num_slots == 24
    assert all(pool.shape == (6, 4, 2, 16) and pool.dtype == jnp.bfloat16 for pool in jax.tree.leaves(kv))


@pytest.mark.parametrize("slots", [[5], [24], [7, 0, 23], [24, 3, 24], [24, 24, 24]])
def test_write_fills_its_slots_and_drops_padding(slots):
    pages = PagedLayer(k=jnp.full((6, 4, 2, 3), jnp.nan), v=jnp.full((6, 4, 2, 3), jnp.nan))
    k, v = numbered(len(slots), 2, 3), numbered(len(slots), 2, 3, start=100)
    written = jax.jit(write_slots)(pages, k, v, jnp.asarray(slots, jnp.int32))
    for pool, rows in ((written.k, k), (written.v, v)):
        expected = np.full((24, 2, 3), np.nan, np.float32)
        for slot, row in zip(slots, rows, strict=True):
            if slot < 24:
                expected[slot] = row
        np.testing.assert_array_equal(np.asarray(pool).reshape(24, 2, 3), expected)


def test_write_casts_to_the_pool():
    pages = PagedLayer(*(jnp.zeros((1, 4, 1, 2), jnp.bfloat16) for _ in range(2)))
    written = write_slots(pages, numbered(1, 1, 2), numbered(1, 1, 2), jnp.asarray([2], jnp.int32))
    assert written.k.dtype == written.v.dtype == jnp.bfloat16


def shapes_of_step(num_tokens: int, num_rows: int, *, decode: bool):
    """Shapes of `forward`'s arguments with a pool of 64 MiB in each of 4 arrays."""
    family, config = family_of(LLAMA), translate(LLAMA)
    is_source = lambda leaf: isinstance(leaf, Source)
    shape = lambda source: jax.ShapeDtypeStruct(source.shape, FLOAT32)
    params = jax.tree.map(shape, family.sources(config), is_leaf=is_source)
    kv = jax.eval_shape(partial(init_pages, config, num_pages=32768, page_size=16, dtype=FLOAT32))
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    tokens = [ints(num_tokens) for _ in range(3)]
    bounds = None if decode else ints(num_rows + 1)
    return params, kv, StepBatch(*tokens, ints(num_rows, 8), ints(num_rows), bounds)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "decode"),
    [(1, 1, True), (4, 4, True), (1, 1, False), (64, 4, False)],
    ids=["decode-1", "decode-4", "prefill-1", "prefill-64"],
)
def test_forward_updates_donated_pages_in_place(num_tokens, num_rows, decode):
    params, kv, batch = shapes_of_step(num_tokens, num_rows, decode=decode)
    pool_bytes = kv.layers[0].k.size * FLOAT32.itemsize
    step = jax.jit(partial(forward, config=translate(LLAMA)), donate_argnums=1)
    memory = step.lower(params, kv, batch).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 4 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 16


def test_donated_pages_are_deleted():
    pages = PagedLayer(k=jnp.zeros((6, 4, 2, 3)), v=jnp.zeros((6, 4, 2, 3)))
    write = jax.jit(write_slots, donate_argnums=0)
    kept = write(pages, numbered(2, 2, 3), numbered(2, 2, 3), jnp.asarray([1, 24], jnp.int32))
    assert pages.k.is_deleted() and pages.v.is_deleted()
    assert not kept.k.is_deleted()


def test_gathered_context_is_flush_right_and_commits_only_new_tokens():
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(24, 2, 3)).astype(np.float32)
    slots = np.array([[16, 17, 18, 19, 4, 5], [8, 9, 0, 0, 0, 0]])  # pages 4, 1 and 2
    pool = np.full((24, 2, 3), np.nan, np.float32)
    pool[slots[0]], pool[slots[1, :2]] = tokens[slots[0]], tokens[slots[1, :2]]
    kv = PagedKV(layers=(PagedLayer(*(jnp.asarray(pool.reshape(6, 4, 2, 3) * sign) for sign in (1, -1))),))
    table, lens = jnp.asarray([[4, 1], [2, 3], [0, 0]], jnp.int32), jnp.asarray([6, 2, 0], jnp.int32)
    gathered = gather_context(kv, table, lens, num_columns=9)
    layer = gathered.layers[0]
    assert layer.k.shape == (3, 2, 3, 9) and layer.v.shape == (3, 2, 9, 3) and gathered.column == 6
    np.testing.assert_array_equal(gathered.starts, [0, 4, 6])
    np.testing.assert_array_equal(layer.k[0, :, :, :6], tokens[slots[0]].transpose(1, 2, 0))
    np.testing.assert_array_equal(layer.v[1, :, 4:6], -tokens[slots[1, :2]].transpose(1, 0, 2))
    assert np.isfinite(layer.k).all() and np.isfinite(layer.v).all()

    new = numbered(3, 2, 3, start=1)
    columns = append_column(layer, new, -new, gathered.column)
    to = jnp.asarray([[6, 24], [10, 24], [24, 24]], jnp.int32)
    committed = commit_columns(kv, gathered._replace(layers=(columns,)), gathered.column, to)
    pool[[6, 10]] = new[:2]
    np.testing.assert_array_equal(committed.layers[0].k, pool.reshape(6, 4, 2, 3))
    np.testing.assert_array_equal(committed.layers[0].v, -pool.reshape(6, 4, 2, 3))


def test_bytes_per_token_of_opt_13b_are_those_published():
    """800 KiB a token in float16. Source: Kwon et al. 2023 (arXiv 2309.06180), section 3."""
    assert translate(OPT_13B).kv_bytes_per_token(2) == 819200


def test_bytes_per_token_are_those_of_the_pool():
    config = translate(LLAMA)
    kv = init_pages(config, num_pages=6, page_size=4, dtype=FLOAT32)
    assert sum(pool.nbytes for pool in jax.tree.leaves(kv)) == kv.num_slots * config.kv_bytes_per_token(4)
