"""The jitted steps of serving: prompt chunks in, then runs of decode steps; sampling inside, pages donated."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.cache.pages import GatheredKV, PagedKV, commit_columns, gather_context
from jaxinfer.config import ModelConfig
from jaxinfer.decoding.penalties import add_token, ban_until, count_tokens, edit_logits
from jaxinfer.decoding.sample import sample, token_logprobs
from jaxinfer.models.decoder import forward, logits
from jaxinfer.types import Logprobs, Params, SamplingBatch, StepBatch, StepOutput, TokenCounts

PROMPT_SCORE_TOKENS = 128  # prompt positions whose logits exist at once


@partial(jax.jit, static_argnames=("config", "num_logprobs", "num_prompt_logprobs"), donate_argnames="kv")
def prefill_step(
    params: Params,
    kv: PagedKV,
    batch: StepBatch,
    sampling: SamplingBatch,
    next_ids: Int[Array, " T"],
    *,
    config: ModelConfig,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> tuple[PagedKV, StepOutput, Logprobs | None]:
    """Run one chunk of prompt of each row and sample the token after it.

    Args:
        params: weights.
        kv: the pool; donated.
        batch: ragged prompt chunks.
        sampling: the host ignores the id of a row whose prompt continues.
        next_ids: the prompt token after each token; what prompt log probabilities score.
        config: the model.
        num_logprobs: alternatives reported with the sampled token; None reports nothing.
        num_prompt_logprobs: alternatives reported at every prompt position; None reports nothing.

    Returns:
        The pool, one token per row, and the log probability of `next_ids` at each position of the flat batch.
    """
    kv, hidden = forward(params, kv, batch, config=config)
    assert batch.cu_q_lens is not None
    last = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
    counts = _count(sampling, config)
    choice = _choose(
        params, hidden[last], sampling, counts, sampling.num_outputs, batch.context_lens, num_logprobs=num_logprobs
    )
    is_real = (batch.context_lens > 0).astype(jnp.int32)
    prompt = None
    if num_prompt_logprobs is not None:
        prompt = _score_prompt(params, hidden, next_ids, num_prompt_logprobs)
    spread = jax.tree.map(lambda row: row[:, None], choice)
    return kv, StepOutput(spread.ids, is_real, spread.logprobs), prompt


class _Choice(NamedTuple):
    ids: Int[Array, " B"]
    logprobs: Logprobs | None


class _Run(NamedTuple):
    """State of a run of decode steps."""

    step: Int[Array, ""]
    kv: Any  # a PagedKV or a GatheredKV, the same kind all along
    token_ids: Int[Array, " B"]
    active: Bool[Array, " B"]
    num_tokens: Int[Array, " B"]  # emitted in this run
    counts: TokenCounts | None
    emitted: _Choice  # [J, B]


@partial(jax.jit, static_argnames="num_columns")
def gather_step(
    kv: PagedKV, block_table: Int[Array, "B M"], committed: Int[Array, " B"], *, num_columns: int
) -> GatheredKV:
    """Copy a batch's committed context out of the pages, for `decode_step` to read; see `gather_context`."""
    return gather_context(kv, block_table, committed, num_columns=num_columns)


@partial(jax.jit, static_argnames=("config", "max_steps", "num_logprobs"), donate_argnames=("kv", "gathered"))
def decode_step(
    params: Params,
    kv: PagedKV,
    gathered: GatheredKV | None,
    batch: StepBatch,
    sampling: SamplingBatch,
    num_steps: Int[Array, ""],
    *,
    config: ModelConfig,
    max_steps: int,
    num_logprobs: int | None = None,
) -> tuple[PagedKV, GatheredKV | None, StepOutput]:
    """Generate up to `num_steps` tokens in every row, ending early when no row is left.

    A row ends at one of its stop ids or at its `max_tokens`; its pages must hold the tokens it may still emit.

    Args:
        params: weights.
        kv: the pool; donated.
        gathered: a copy of these rows' context, with room for `max_steps` more columns; donated. None reads pages.
        batch: one token per row, whose key and value are not in the pool yet; `context_lens` counts it,
            `slot_mapping` is not read.
        sampling: how rows choose and end.
        num_steps: at most `max_steps`; dynamic.
        config: the model.
        max_steps: room for emitted tokens; static.
        num_logprobs: alternatives reported with each token; None reports nothing.

    Returns:
        The pool with the new tokens in it, the copy likewise, and what the rows emitted.
    """
    committed = jnp.maximum(batch.context_lens - 1, 0)
    run = _Run(
        step=jnp.int32(0),
        kv=kv if gathered is None else gathered,
        token_ids=batch.token_ids,
        active=sampling.num_outputs < sampling.max_tokens,
        num_tokens=jnp.zeros_like(batch.token_ids),
        counts=_count(sampling, config),
        emitted=_room(max_steps, batch.token_ids.shape[0], num_logprobs),
    )
    advance = partial(_decode_one, params, kv, batch, sampling, config=config, num_logprobs=num_logprobs)
    run = jax.lax.while_loop(lambda run: (run.step < num_steps) & jnp.any(run.active), advance, run)
    if gathered is None:
        kv = run.kv
    else:
        steps = jnp.arange(max_steps, dtype=jnp.int32)
        written = steps < run.num_tokens[:, None]
        slots = _slots(kv, batch.block_table, committed[:, None] + steps, written)
        kv, gathered = commit_columns(kv, run.kv, gathered.column, slots), run.kv
    rows_first = jax.tree.map(lambda steps: jnp.swapaxes(steps, 0, 1), run.emitted)
    return kv, gathered, StepOutput(rows_first.ids, run.num_tokens, rows_first.logprobs)


def _decode_one(
    params: Params,
    pool: PagedKV,
    batch: StepBatch,
    sampling: SamplingBatch,
    run: _Run,
    *,
    config: ModelConfig,
    num_logprobs: int | None,
) -> _Run:
    positions = jnp.maximum(batch.context_lens - 1, 0) + run.step
    step_batch = batch._replace(
        token_ids=run.token_ids,
        positions=positions,
        slot_mapping=_slots(pool, batch.block_table, positions[:, None], run.active[:, None])[:, 0],
        context_lens=jnp.where(batch.context_lens > 0, positions + 1, 0),
    )
    kv, hidden = forward(params, run.kv, step_batch, config=config)
    if isinstance(kv, GatheredKV):
        kv = kv._replace(column=kv.column + 1)
    num_outputs = sampling.num_outputs + run.num_tokens
    choice = _choose(params, hidden, sampling, run.counts, num_outputs, positions + 1, num_logprobs=num_logprobs)
    is_stop = jnp.any(choice.ids[:, None] == sampling.stop_ids, axis=1)
    return _Run(
        step=run.step + 1,
        kv=kv,
        token_ids=choice.ids,
        active=run.active & ~is_stop & (num_outputs + 1 < sampling.max_tokens),
        num_tokens=run.num_tokens + run.active.astype(jnp.int32),
        counts=None if run.counts is None else add_token(run.counts, choice.ids, run.active),
        emitted=jax.tree.map(lambda room, row: room.at[run.step].set(row), run.emitted, choice),
    )


def _choose(
    params: Params,
    hidden: Float[Array, "B D"],
    sampling: SamplingBatch,
    counts: TokenCounts | None,
    num_outputs: Int[Array, " B"],
    positions: Int[Array, " B"],
    *,
    num_logprobs: int | None,
) -> _Choice:
    """Sample the token at `positions` from each row's last hidden state."""
    raw = logits(params, hidden)
    edited = raw
    if sampling.edits is not None and counts is not None:
        edited = edit_logits(edited, sampling.edits, counts)
    too_early = num_outputs < sampling.min_tokens
    edited = jax.lax.cond(jnp.any(too_early), lambda x: ban_until(x, sampling.stop_ids, too_early), lambda x: x, edited)
    with jax.named_scope("sample"):
        ids = sample(edited, sampling.rows, positions)
    return _Choice(ids, None if num_logprobs is None else token_logprobs(raw, ids, num_top=num_logprobs))


def _count(sampling: SamplingBatch, config: ModelConfig) -> TokenCounts | None:
    if sampling.history is None or sampling.prompt_lens is None:
        return None
    return count_tokens(
        sampling.history, sampling.prompt_lens, sampling.prompt_lens + sampling.num_outputs, config.vocab_size
    )


def _slots(
    pool: PagedKV, block_table: Int[Array, "B M"], positions: Int[Array, "B J"], written: Bool[Array, "B J"]
) -> Int[Array, "B J"]:
    page_size = pool.layers[0].k.shape[1]
    pages = jnp.take_along_axis(block_table, positions // page_size, axis=1, mode="clip")
    return jnp.where(written, pages * page_size + positions % page_size, pool.num_slots)


def _room(max_steps: int, num_rows: int, num_logprobs: int | None) -> _Choice:
    """Zeros for what `max_steps` steps emit."""
    ints, floats = jnp.zeros((max_steps, num_rows), jnp.int32), jnp.zeros((max_steps, num_rows), jnp.float32)
    if num_logprobs is None:
        return _Choice(ints, None)
    top = (max_steps, num_rows, num_logprobs)
    return _Choice(ints, Logprobs(floats, ints, jnp.zeros(top, jnp.float32), jnp.zeros(top, jnp.int32)))


def _score_prompt(params: Params, hidden: Float[Array, "T D"], next_ids: Int[Array, " T"], num_top: int) -> Logprobs:
    """Log probability each position gives to its next token, a slice of positions at a time."""
    num_tokens = next_ids.shape[0]
    size = min(PROMPT_SCORE_TOKENS, num_tokens)

    def score(args: tuple[Float[Array, "size D"], Int[Array, " size"]]) -> Logprobs:
        return token_logprobs(logits(params, args[0]), args[1], num_top=num_top)

    scored = jax.lax.map(score, (hidden.reshape(-1, size, hidden.shape[1]), next_ids.reshape(-1, size)))
    return jax.tree.map(lambda x: x.reshape(num_tokens, *x.shape[2:]), scored)
