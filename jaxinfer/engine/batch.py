"""Packs a plan into the padded arrays of a step. Every shape comes from a short table of buckets."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxinfer.engine.request import Sequence
from jaxinfer.engine.scheduler import DecodePlan, PrefillPlan
from jaxinfer.types import LogitEdits, SamplingBatch, SamplingRows, StepBatch

MIN_TOKENS_BUCKET = 16
MIN_COLUMNS_BUCKET = 128
LOGPROBS_BUCKETS = (0, 1, 5, 20)
STOP_IDS_BUCKET = 8


def power_buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """`smallest` doubled until it covers `largest`, the last one cut to it."""
    sizes = [min(smallest, largest)]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    return tuple(sizes)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The padded sizes a step may have; a program is compiled for each combination that occurs."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]  # of a prefill step
    columns: tuple[int, ...]  # of a batch's gathered context, in tokens
    max_pages: int  # per row
    page_size: int
    vocab_size: int
    num_slots: int

    def fit(self, sizes: tuple[int, ...], count: int) -> int:
        """The smallest of `sizes` that holds `count`."""
        return next(size for size in sizes if size >= count)


def pack_prefill(plan: PrefillPlan, buckets: Buckets) -> tuple[StepBatch, Array]:
    """Prompt chunks, flat, and the prompt token after each of their tokens (0 after a prompt's last)."""
    num_rows = buckets.fit(buckets.rows, len(plan.sequences))
    num_tokens = buckets.fit(buckets.tokens, sum(plan.num_tokens))
    token_ids, next_ids, positions = np.zeros((3, num_tokens), np.int32)
    slots = np.full(num_tokens, buckets.num_slots, np.int32)
    cu_q_lens, context_lens = np.zeros(num_rows + 1, np.int32), np.zeros(num_rows, np.int32)
    at = 0
    for row, (sequence, count) in enumerate(zip(plan.sequences, plan.num_tokens, strict=True)):
        start, end = sequence.num_computed, sequence.num_computed + count
        here = slice(at, at + count)
        token_ids[here] = sequence.request.prompt_ids[start:end]
        following = sequence.request.prompt_ids[start + 1 : end + 1]
        next_ids[at : at + len(following)] = following
        positions[here] = np.arange(start, end)
        pages = np.asarray(_pages(sequence), np.int32)
        slots[here] = pages[positions[here] // buckets.page_size] * buckets.page_size + (
            positions[here] % buckets.page_size
        )
        context_lens[row] = end
        at += count
        cu_q_lens[row + 1 :] = at
    table = _block_table(plan.sequences, num_rows, buckets.max_pages)
    *fields, next_ids = _place(token_ids, positions, slots, table, context_lens, cu_q_lens, next_ids)
    return StepBatch(*fields), next_ids


def pack_decode(plan: DecodePlan, buckets: Buckets) -> StepBatch:
    """The last token of every sequence; its key and value are computed by the step."""
    num_rows = buckets.fit(buckets.rows, len(plan.sequences))
    token_ids, context_lens = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    for row, sequence in enumerate(plan.sequences):
        token_ids[row] = sequence.output_ids[-1]
        context_lens[row] = sequence.num_computed + 1
    positions = np.maximum(context_lens - 1, 0)
    table = _block_table(plan.sequences, num_rows, buckets.max_pages)
    return StepBatch(*_place(token_ids, positions, np.zeros_like(token_ids), table, context_lens, None))


def _place(*arrays: np.ndarray | None) -> Any:
    """The arrays on the device, in one transfer."""
    return jax.device_put(arrays)


def _pages(sequence: Sequence) -> list[int]:
    assert sequence.table is not None, "only admitted sequences are packed"
    return sequence.table.pages


def _block_table(sequences: Seq[Sequence], num_rows: int, num_pages: int) -> np.ndarray:
    table = np.zeros((num_rows, num_pages), np.int32)
    for row, sequence in enumerate(sequences):
        pages = _pages(sequence)
        table[row, : len(pages)] = pages
    return table


def pack_sampling(sequences: Seq[Sequence], num_rows: int, buckets: Buckets) -> SamplingBatch:
    """Per-row sampling controls, neutral in padding rows."""
    params = [sequence.request.params for sequence in sequences]
    column, vocab_size = partial(_column, num_rows), buckets.vocab_size
    keys, *controls = _place(
        _key_data(sequences, num_rows),
        column([p.temperature for p in params], 0, np.float32),
        column([p.top_k or vocab_size for p in params], vocab_size, np.int32),
        column([p.top_p for p in params], 1, np.float32),
        column([p.min_p for p in params], 0, np.float32),
    )
    limits = _place(
        _stop_ids(sequences, num_rows, vocab_size),
        column([len(sequence.output_ids) for sequence in sequences], 0, np.int32),
        column([p.min_tokens for p in params], 0, np.int32),
        column([sequence.request.max_tokens for sequence in sequences], 0, np.int32),
    )
    edits, history, prompt_lens = None, None, None
    if any(_edits_logits(sequence) for sequence in sequences):
        edits = _edits(sequences, num_rows, vocab_size)
        lens = [len(sequence.request.prompt_ids) for sequence in sequences]
        history, prompt_lens = _place(_history(sequences, num_rows, buckets), column(lens, 0, np.int32))
    rows = SamplingRows(jax.random.wrap_key_data(keys), *controls)
    return SamplingBatch(rows, *limits, edits=edits, history=history, prompt_lens=prompt_lens)


def _column(num_rows: int, values: Seq[float | int], padding: float | int, dtype: type) -> np.ndarray:
    out = np.full(num_rows, padding, dtype)
    out[: len(values)] = values
    return out


def num_logprobs(sequences: Seq[Sequence]) -> int | None:
    """Alternatives the step must report: the most any of its requests wants, rounded up to a bucket."""
    wanted = [s.request.params.logprobs for s in sequences if s.request.params.logprobs is not None]
    return next(size for size in LOGPROBS_BUCKETS if size >= max(wanted)) if wanted else None


def num_prompt_logprobs(sequences: Seq[Sequence]) -> int | None:
    """The same for prompt positions."""
    wanted = [s.request.params.prompt_logprobs for s in sequences if s.request.params.prompt_logprobs is not None]
    return next(size for size in LOGPROBS_BUCKETS if size >= max(wanted)) if wanted else None


def _key_data(sequences: Seq[Sequence], num_rows: int) -> np.ndarray:
    data = np.zeros((num_rows, 2), np.uint32)
    for row, sequence in enumerate(sequences):
        data[row] = sequence.key_data
    return data


def _stop_ids(sequences: Seq[Sequence], num_rows: int, vocab_size: int) -> np.ndarray:
    longest = max((len(sequence.request.stop_ids) for sequence in sequences), default=0)
    width = STOP_IDS_BUCKET
    while width < longest:
        width *= 2
    table = np.full((num_rows, width), vocab_size, np.int32)
    for row, sequence in enumerate(sequences):
        table[row, : len(sequence.request.stop_ids)] = sequence.request.stop_ids
    return table


def _edits_logits(sequence: Sequence) -> bool:
    p = sequence.request.params
    penalised = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1, 0, 0)
    return penalised or bool(p.logit_bias or p.bad_token_ids) or p.allowed_token_ids is not None


def _edits(sequences: Seq[Sequence], num_rows: int, vocab_size: int) -> LogitEdits:
    params = [sequence.request.params for sequence in sequences]
    bias = np.zeros((num_rows, vocab_size), np.float32)
    for row, p in enumerate(params):
        if p.allowed_token_ids is not None:
            bias[row] = -np.inf
            bias[row, list(p.allowed_token_ids)] = 0
        for token_id, value in dict(p.logit_bias or {}).items():
            bias[row, token_id] += value
        bias[row, list(p.bad_token_ids or ())] = -np.inf
    penalties = (
        _column(num_rows, [p.repetition_penalty for p in params], 1, np.float32),
        _column(num_rows, [p.presence_penalty for p in params], 0, np.float32),
        _column(num_rows, [p.frequency_penalty for p in params], 0, np.float32),
    )
    return LogitEdits(*_place(*penalties, bias))


def _history(sequences: Seq[Sequence], num_rows: int, buckets: Buckets) -> np.ndarray:
    longest = max(sequence.num_tokens for sequence in sequences)
    width = buckets.fit(buckets.columns, longest)
    history = np.full((num_rows, width), buckets.vocab_size, np.int32)
    for row, sequence in enumerate(sequences):
        ids = sequence.request.prompt_ids + sequence.output_ids
        history[row, : len(ids)] = ids
    return history
