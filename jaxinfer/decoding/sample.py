"""Filters and sampling on float32 logits, and the log probabilities that are reported with a token.

The filters come in the order temperature, top-k, top-p, min-p, each on what the one before it left, as in vLLM and
transformers. Each keeps the tokens at or above a cut-off, which is found exactly by bisection over the ordered bit
patterns of float32 instead of by sorting the vocabulary. Tokens whose scaled logits tie at a cut-off are all kept.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxinfer.types import Logprobs, SamplingRows

BISECTION_STEPS = 31  # the float32 values from -inf to 0 have fewer than 2**31 bit patterns
_Bounds = tuple[Int[Array, ""], Int[Array, ""]]
TINY = float(jnp.finfo(jnp.float32).tiny)


def first_argmax(x: Float[Array, " V"]) -> Int[Array, ""]:
    """Index of the maximum, the first on ties; in range whatever `x` holds.

    XLA:CPU runs these two plain reductions three times faster than the one over pairs that `argmax` becomes.
    """
    size = x.shape[0]
    index = jnp.where(x == jnp.max(x), jnp.arange(size, dtype=jnp.int32), size)
    return jnp.minimum(jnp.min(index), size - 1)


def scale_logits(logits: Float[Array, " V"], temperature: Float[Array, ""]) -> Float[Array, " V"]:
    """`(logits - max) / temperature`: at most 0, so that no temperature overflows it."""
    largest = jnp.max(logits)
    shift = jnp.where(jnp.isfinite(largest), largest, 0)  # -inf: every token is banned, and must not become NaN
    return (logits - shift) / jnp.maximum(temperature, TINY)


def top_k_cutoff(scaled: Float[Array, " V"], top_k: Int[Array, ""]) -> Float[Array, ""]:
    """The `top_k`-th largest value.

    Args:
        scaled: at most 0.
        top_k: from 1; V keeps everything.
    """
    keeps_enough = lambda cutoff: jnp.sum((scaled >= cutoff).astype(jnp.int32)) >= top_k
    return jnp.where(top_k < scaled.shape[0], _largest(keeps_enough), -jnp.inf)


def top_p_cutoff(scaled: Float[Array, " V"], top_p: Float[Array, ""], floor: Float[Array, ""]) -> Float[Array, ""]:
    """The highest cut-off that keeps a share of at least `top_p` of the probability at or above `floor`.

    Args:
        scaled: its largest value is 0.
        top_p: share; 1 keeps everything.
        floor: cut-off of the filters before this one.

    Source: nucleus sampling, Holtzman et al. 2020 (arXiv 1904.09751).
    """
    mass = jnp.where(scaled >= floor, jnp.exp(scaled), 0)
    needed = top_p * jnp.sum(mass)
    keeps_enough = lambda cutoff: jnp.sum(jnp.where(scaled >= cutoff, mass, 0)) >= needed
    return jnp.where(top_p < 1, _largest(keeps_enough), -jnp.inf)


def min_p_cutoff(min_p: Float[Array, ""]) -> Float[Array, ""]:
    """The cut-off that keeps tokens at least `min_p` times as probable as the most probable one.

    Source: Nguyen et al. 2024 (arXiv 2407.01082).
    """
    return jnp.log(min_p)


def sample_token(
    logits: Float[Array, " V"],
    *,
    key: Key[Array, ""],
    temperature: Float[Array, ""],
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
    min_p: Float[Array, ""],
) -> Int[Array, ""]:
    """Draw one token from the filtered softmax, by the Gumbel-max trick.

    Args:
        logits: -inf where a token is banned.
        key: of this token alone.
        temperature: 0 takes the most likely token, the first on ties, and filters nothing.
        top_k: from 1; V keeps everything.
        top_p: in (0, 1].
        min_p: in [0, 1].
    """
    scaled = scale_logits(logits, temperature)
    cutoff = top_k_cutoff(scaled, top_k)
    cutoff = jnp.maximum(cutoff, top_p_cutoff(scaled, top_p, cutoff))
    return _draw(logits, scaled, jnp.maximum(cutoff, min_p_cutoff(min_p)), temperature, key)


def sample(logits: Float[Array, "B V"], rows: SamplingRows, positions: Int[Array, " B"]) -> Int[Array, " B"]:
    """`sample_token` on every row, at the cost of no more than the batch asks for.

    A row's token depends on nothing but its logits, its controls and its position: all rows greedy cost one argmax,
    and a filter's bisection runs only when some sampled row uses it.

    Args:
        logits: -inf where a token is banned.
        rows: controls.
        positions: of the tokens being sampled; folded into the rows' keys.
    """
    is_sampled = rows.temperature > 0

    def draw() -> Int[Array, " B"]:
        scaled = jax.vmap(scale_logits)(logits, rows.temperature)
        cutoffs = jnp.full_like(rows.top_p, -jnp.inf)
        cutoffs = jax.lax.cond(
            jnp.any(is_sampled & (rows.top_k < logits.shape[1])),
            lambda: jax.vmap(top_k_cutoff)(scaled, rows.top_k),
            lambda: cutoffs,
        )
        cutoffs = jax.lax.cond(
            jnp.any(is_sampled & (rows.top_p < 1)),
            lambda: jnp.maximum(cutoffs, jax.vmap(top_p_cutoff)(scaled, rows.top_p, cutoffs)),
            lambda: cutoffs,
        )
        cutoffs = jnp.maximum(cutoffs, jax.vmap(min_p_cutoff)(rows.min_p))
        keys = jax.vmap(jax.random.fold_in)(rows.keys, positions)
        return jax.vmap(_draw)(logits, scaled, cutoffs, rows.temperature, keys)

    return jax.lax.cond(jnp.any(is_sampled), draw, lambda: jax.vmap(first_argmax)(logits))


def token_logprobs(logits: Float[Array, "B V"], ids: Int[Array, " B"], *, num_top: int) -> Logprobs:
    """Natural log probabilities of `ids` and of the `num_top` most likely tokens, best first.

    Args:
        logits: raw, before any edit or filter.
        ids: the chosen tokens; NaN is reported for one outside the vocabulary.
        num_top: static; 0 reports no alternatives.
    """

    def score(logits: Float[Array, " V"], token_id: Int[Array, ""]) -> Logprobs:
        total = jax.nn.logsumexp(logits)
        chosen = logits.at[token_id].get(mode="fill", fill_value=jnp.nan)
        rank = 1 + jnp.sum((logits > chosen).astype(jnp.int32))
        top, top_ids = jax.lax.top_k(logits, num_top)
        return Logprobs(chosen=chosen - total, rank=rank, top=top - total, top_ids=top_ids)

    return jax.vmap(score)(logits, ids)


def _draw(
    logits: Float[Array, " V"],
    scaled: Float[Array, " V"],
    cutoff: Float[Array, ""],
    temperature: Float[Array, ""],
    key: Key[Array, ""],
) -> Int[Array, ""]:
    noise = jax.random.gumbel(key, scaled.shape, scaled.dtype)
    noisy = jnp.where(scaled >= cutoff, scaled + noise, -jnp.inf)
    return first_argmax(jnp.where(temperature > 0, noisy, logits))


def _largest(holds: Callable[[Float[Array, ""]], Bool[Array, ""]]) -> Float[Array, ""]:
    """The largest float32 in [-inf, 0] at which `holds`, which is monotone, is still true; -inf if it never is."""

    def halve(_: Int[Array, ""], bounds: _Bounds) -> _Bounds:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        is_held = holds(_from_order(middle))
        return jnp.where(is_held, middle, low), jnp.where(is_held, high, middle - 1)

    bounds = _to_order(jnp.float32(-jnp.inf)), _to_order(jnp.float32(0))
    low, _ = jax.lax.fori_loop(0, BISECTION_STEPS, halve, bounds)
    return _from_order(low)


def _to_order(x: Float[Array, ""]) -> Int[Array, ""]:
    """An integer that orders as `x` does."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_order(order: Int[Array, ""]) -> Float[Array, ""]:
    return jax.lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)
