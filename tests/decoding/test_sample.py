import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import chi2
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jaxinfer.decoding import sample as module
from jaxinfer.decoding.sample import min_p_cutoff, scale_logits, top_k_cutoff, top_p_cutoff
from jaxinfer.types import SamplingRows

torch = pytest.importorskip("torch")

first_argmax, sample, sample_token = map(jax.jit, (module.first_argmax, module.sample, module.sample_token))
token_logprobs = jax.jit(module.token_logprobs, static_argnames="num_top")

V = 64
CONFIDENCE = 0.999  # a fixed key passes or fails for good; one false alarm in a thousand keys

floats = st.floats(-30, 30, width=32, allow_subnormal=False)


@jax.jit
def filtered(logits, temperature, top_k, top_p, min_p):
    """Scaled logits and which of them survive; the composition inside `sample_token`."""
    scaled = scale_logits(logits, temperature)
    cutoff = top_k_cutoff(scaled, top_k)
    cutoff = jnp.maximum(cutoff, top_p_cutoff(scaled, top_p, cutoff))
    return scaled, scaled >= jnp.maximum(cutoff, min_p_cutoff(min_p))


def keep(logits, temperature=1.0, top_k=V, top_p=1.0, min_p=0.0):
    controls = np.float32(temperature), np.int32(top_k), np.float32(top_p), np.float32(min_p)
    scaled, kept = filtered(np.asarray(logits, np.float32), *controls)
    return np.asarray(scaled), np.asarray(kept)


def sorted_keep(scaled, top_k, top_p, min_p):
    """The definition, by sorting, in float64."""
    kept = scaled >= np.sort(scaled)[::-1][top_k - 1]
    mass = np.where(kept, np.exp(scaled.astype(np.float64)), 0)
    above = np.array([mass[scaled > x].sum() for x in scaled])
    if top_p < 1:
        kept &= above < top_p * mass.sum()
    return kept & (mass >= min_p), above / mass.sum(), mass


@given(
    logits=hnp.arrays(np.float32, V, elements=floats),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    top_k=st.integers(1, V),
    top_p=st.floats(2**-7, 1, width=32),
    min_p=st.floats(0, 1, width=32, allow_subnormal=False),
)
@settings(max_examples=200)
def test_filters_equal_sorting_definition(logits, temperature, top_k, top_p, min_p):
    scaled, kept = keep(logits, temperature, top_k, top_p, min_p)
    wanted, above, mass = sorted_keep(scaled, top_k, top_p, min_p)
    is_near = (np.abs(above - top_p) < 1e-5) | (np.abs(mass - min_p) < 1e-5)  # float32 and float64 may differ there
    assert (kept == wanted)[~is_near].all()
    assert kept[np.argmax(logits)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "controls",
    [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.7},
        {"top_k": 30, "top_p": 0.95, "min_p": 0.05},
    ],
)
def test_filters_equal_transformers_warpers(controls, temperature):
    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(0, 3, V).astype(np.float32)
        scores = TemperatureLogitsWarper(temperature)(None, torch.tensor(logits)[None])
        for name, value in controls.items():
            scores = warpers[name](value)(None, scores)
        _, kept = keep(logits, temperature, **controls)
        np.testing.assert_array_equal(kept, np.isfinite(scores[0].numpy()))


def test_ties_at_cutoff_are_all_kept():
    logits = np.full(V, -5.0)
    logits[[3, 9, 40]] = 2.0
    for controls in ({"top_k": 2}, {"top_p": 0.4}, {"min_p": 1.0}):
        assert np.flatnonzero(keep(logits, **controls)[1]).tolist() == [3, 9, 40]


def test_first_argmax_equals_argmax_on_ties_and_stays_in_range():
    tied = np.zeros(V, np.float32)
    tied[[20, 30]] = 1.0
    assert int(first_argmax(tied)) == 20
    assert int(first_argmax(np.full(V, -np.inf, np.float32))) == 0
    assert 0 <= int(first_argmax(np.full(V, np.nan, np.float32))) < V


def rows_of(count, *, temperature=1.0, top_k=V, top_p=1.0, min_p=0.0, seed=0):
    full = lambda value, dtype: jnp.asarray(np.broadcast_to(np.asarray(value, dtype), count))
    return SamplingRows(
        keys=jax.random.split(jax.random.key(seed), count),
        temperature=full(temperature, np.float32),
        top_k=full(top_k, np.int32),
        top_p=full(top_p, np.float32),
        min_p=full(min_p, np.float32),
    )


def random_logits(count, seed=0):
    return np.random.default_rng(seed).normal(0, 3, (count, V)).astype(np.float32)


def test_greedy_equals_argmax():
    logits = random_logits(8)
    ids = sample(logits, rows_of(8, temperature=0.0, top_k=3, top_p=0.5), np.arange(8, dtype=np.int32))
    np.testing.assert_array_equal(ids, logits.argmax(axis=1))


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_vanishing_temperature_equals_argmax(temperature):
    logits = random_logits(8) * 100
    ids = sample(logits, rows_of(8, temperature=temperature), np.arange(8, dtype=np.int32))
    np.testing.assert_array_equal(ids, logits.argmax(axis=1))


def test_row_alone_and_in_batch_give_same_ids():
    logits, positions = random_logits(8), np.arange(100, 108, dtype=np.int32)
    rows = rows_of(
        8,
        temperature=[0, 1, 0.7, 0, 2, 1, 1, 0.3],
        top_k=[V, V, 5, 3, V, V, 40, V],
        top_p=[1, 1, 1, 0.5, 0.9, 1, 0.8, 1],
        min_p=[0, 0, 0, 0, 0, 0.1, 0.01, 0],
    )
    together = np.asarray(sample(logits, rows, positions))
    for b in range(8):
        row = jax.tree.map(operator.itemgetter(slice(b, b + 1)), rows)
        assert int(sample(logits[b : b + 1], row, positions[b : b + 1])[0]) == together[b]
        one = sample_token(
            logits[b],
            key=jax.random.fold_in(rows.keys[b], positions[b]),
            temperature=rows.temperature[b],
            top_k=rows.top_k[b],
            top_p=rows.top_p[b],
            min_p=rows.min_p[b],
        )
        assert int(one) == together[b]


@pytest.mark.parametrize(
    "controls", [{}, {"temperature": 2.0}, {"top_k": 12, "top_p": 0.9, "temperature": 1.5}, {"min_p": 0.05}]
)
def test_sample_follows_filtered_softmax(controls):
    count = 20_000
    logits = np.random.default_rng(1).normal(0, 1.5, V).astype(np.float32)
    rows = rows_of(count, **controls)._replace(keys=jnp.broadcast_to(jax.random.key(7), count))
    ids = np.asarray(sample(np.tile(logits, (count, 1)), rows, np.arange(count, dtype=np.int32)))
    scaled, kept = keep(logits, **controls)
    expected = np.where(kept, np.exp(scaled.astype(np.float64)), 0)
    expected *= count / expected.sum()
    observed = np.bincount(ids, minlength=V)
    assert observed[~kept].sum() == 0
    pooled = kept & (expected < 5)  # the statistic wants a handful in each cell
    cells = [(observed[i], expected[i]) for i in np.flatnonzero(kept & ~pooled)]
    if pooled.any():
        cells.append((observed[pooled].sum(), expected[pooled].sum()))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    assert statistic < chi2.ppf(CONFIDENCE, len(cells) - 1)


def test_banned_tokens_are_never_drawn_and_banned_rows_stay_in_range():
    logits = np.full((4096, V), -np.inf, np.float32)
    logits[:, [5, 6]] = -1e4
    logits[0] = -np.inf
    rows = rows_of(4096, temperature=1e6, top_p=0.99, top_k=60)
    ids = np.asarray(sample(logits, rows, np.arange(4096, dtype=np.int32)))
    assert ids[0] == 0 and set(ids[1:].tolist()) == {5, 6}


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_token_logprobs_equal_log_softmax(num_top):
    logits, ids = random_logits(6), np.array([0, 5, 63, 7, 1, 30], np.int32)
    scored = token_logprobs(logits, ids, num_top=num_top)
    wanted = torch.log_softmax(torch.tensor(logits), dim=-1).numpy()
    order = np.argsort(-wanted, axis=1)
    np.testing.assert_allclose(scored.chosen, wanted[np.arange(6), ids], atol=1e-5)
    np.testing.assert_array_equal(scored.rank, [1 + order[b].tolist().index(ids[b]) for b in range(6)])
    np.testing.assert_array_equal(scored.top_ids, order[:, :num_top])
    np.testing.assert_allclose(scored.top, np.take_along_axis(wanted, order[:, :num_top], 1), atol=1e-5)
