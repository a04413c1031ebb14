"""The loop around the steps: schedule, pack, run, hand out tokens."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.blocks import BlockManager
from jaxinfer.cache.pages import GatheredKV, init_pages
from jaxinfer.cache.plan import MemoryPlan
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.batch import (
    MIN_COLUMNS_BUCKET,
    MIN_TOKENS_BUCKET,
    Buckets,
    num_logprobs,
    num_prompt_logprobs,
    pack_decode,
    pack_prefill,
    pack_sampling,
    power_buckets,
)
from jaxinfer.engine.request import FinishReason, Request, Sequence, TokenLogprobs
from jaxinfer.engine.scheduler import DecodePlan, PrefillPlan, Scheduler
from jaxinfer.steps import decode_step, gather_step, prefill_step
from jaxinfer.types import Logprobs, Params, StepBatch, StepOutput

Progress = Callable[[str, int, int], None]

MAX_DECODE_STEPS = 8  # tokens a row may generate in one call of the device


class Engine:
    """Runs requests to completion over one pool of pages."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        options: EngineConfig,
        plan: MemoryPlan,
        *,
        progress: Progress | None = None,
    ):
        self._params = params
        self._config = config
        self._progress = progress
        self._programs: set[tuple[Any, ...]] = set()
        blocks = BlockManager(plan.num_pages, plan.page_size)
        self._scheduler = Scheduler(
            blocks,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_decode_steps=MAX_DECODE_STEPS,
        )
        self._kv = init_pages(config, num_pages=plan.num_pages, page_size=plan.page_size, dtype=plan.dtype)
        self._max_gathered_tokens = plan.max_gathered_tokens
        self._gathered: tuple[list[Sequence], GatheredKV] | None = None  # of the rows that decoded last
        self.buckets = _buckets(config, options, plan)

    def run(self, requests: list[Request]) -> None:
        """Run requests to their end; whatever interrupts this, they hold no pages afterwards."""
        try:
            for request in requests:
                self.add(request)
            while not all(request.is_finished for request in requests):
                self.step()
        finally:
            self.abort(requests)

    def stream(self, request: Request) -> Iterator[str]:
        """Run a request of one sequence, yielding text as it becomes complete; closing the iterator aborts it."""
        sequence, shown, is_finished = request.sequences[0], 0, False
        try:
            self.add(request)
            while not is_finished:
                if not request.is_finished:  # another call's steps may have finished it
                    self.step()
                is_finished = request.is_finished
                piece, shown = sequence.text[shown:], len(sequence.text)
                if piece:
                    yield piece
        finally:
            self.abort([request])

    def add(self, request: Request) -> None:
        """Queue every sequence of a request."""
        if self._kv.layers[0].k.is_deleted():
            raise RuntimeError("this engine is closed; make a new one to generate again")
        key = jax.random.wrap_key_data(jnp.array([request.seed >> 32, request.seed & 0xFFFFFFFF], jnp.uint32))
        for sequence in request.sequences:
            sequence.key_data = tuple(jax.random.key_data(jax.random.fold_in(key, sequence.index)).tolist())
            self._scheduler.add(sequence)

    def abort(self, requests: Iterable[Request]) -> None:
        """End requests where they are and free their pages."""
        for sequence in (sequence for request in requests for sequence in request.sequences):
            if sequence.finish_reason is None:
                self._finish(sequence, "abort")

    def step(self) -> None:
        """Run one prefill or a run of decode steps, and hand the new tokens to their sequences."""
        plan = self._scheduler.schedule()
        if isinstance(plan, PrefillPlan):
            self._prefill(plan)
        else:
            self._decode(plan)

    def close(self) -> None:
        """Free weights and pool on the device."""
        for leaf in jax.tree.leaves((self._params, self._kv, self._gathered and self._gathered[1])):
            leaf.delete()

    def _prefill(self, plan: PrefillPlan) -> None:
        batch, next_ids = pack_prefill(plan, self.buckets)
        top, prompt_top = num_logprobs(plan.sequences), num_prompt_logprobs(plan.sequences)
        sampling = pack_sampling(plan.sequences, len(batch.context_lens), self.buckets)
        self._announce(
            "prefill", len(batch.token_ids), len(batch.context_lens), top, prompt_top, sampling.edits is None
        )
        self._kv, out, prompt = prefill_step(
            self._params,
            self._kv,
            batch,
            sampling,
            next_ids,
            config=self._config,
            num_logprobs=top,
            num_prompt_logprobs=prompt_top,
        )
        out, prompt = jax.device_get((out, prompt))
        at = 0
        for row, (sequence, count) in enumerate(zip(plan.sequences, plan.num_tokens, strict=True)):
            if prompt is not None:
                _score_prompt(sequence, prompt, at, count)
            sequence.num_computed += count
            at += count
            if sequence.num_uncomputed_prompt == 0:
                self._emit(sequence, out, row)

    def _decode(self, plan: DecodePlan) -> None:
        batch = pack_decode(plan, self.buckets)
        gathered = self._take_gathered(plan, batch)
        num_columns = gathered.num_columns if gathered else 0
        top = num_logprobs(plan.sequences)
        sampling = pack_sampling(plan.sequences, len(batch.context_lens), self.buckets)
        self._announce(
            "decode", len(batch.token_ids), num_columns, top, sampling.edits is None, sampling.stop_ids.shape
        )
        self._kv, gathered, out = decode_step(
            self._params,
            self._kv,
            gathered,
            batch,
            sampling,
            jnp.int32(plan.num_steps),
            config=self._config,
            max_steps=MAX_DECODE_STEPS,
            num_logprobs=top,
        )
        out = jax.device_get(out)
        for row, sequence in enumerate(plan.sequences):
            sequence.num_computed += int(out.num_tokens[row])
            self._emit(sequence, out, row)
        if gathered and not any(sequence.finish_reason for sequence in plan.sequences):
            self._gathered = (plan.sequences, gathered)

    def _take_gathered(self, plan: DecodePlan, batch: StepBatch) -> GatheredKV | None:
        """The rows' context side by side: the last call's copy while it fits, else a new one; None without room."""
        kept, self._gathered = self._gathered, None
        committed = max(sequence.num_computed for sequence in plan.sequences)
        needed = committed + MAX_DECODE_STEPS
        if kept and kept[0] == plan.sequences and needed <= kept[1].num_columns:
            return kept[1]
        del kept  # its memory is the new copy's
        num_columns = self.buckets.fit(self.buckets.columns, needed)
        if len(batch.token_ids) * num_columns > self._max_gathered_tokens:
            return None
        lens = jnp.maximum(batch.context_lens - 1, 0)
        return gather_step(self._kv, batch.block_table, lens, num_columns=num_columns)

    def _announce(self, *program: Any) -> None:
        """Tell the user that the coming call compiles or reads a compiled program, if it does."""
        if program not in self._programs and self._progress:
            self._progress(f"Preparing {program[0]} step ({program[1]} x {program[2]})", 0, 0)
        self._programs.add(program)

    def _emit(self, sequence: Sequence, out: StepOutput, row: int) -> None:
        """Hand a row's tokens to its sequence until it ends."""
        request = sequence.request
        request.timings.first_token = request.timings.first_token or time.perf_counter()
        for step in range(int(out.num_tokens[row]) if request.max_tokens else 0):
            token_id, scores = int(out.ids[row, step]), None
            if request.params.logprobs is not None and out.logprobs is not None:
                scores = _logprobs(out.logprobs, (row, step), token_id, request.params.logprobs)
            sequence.append(token_id, scores)
            if sequence.finish_reason:
                break
        if sequence.finish_reason or request.max_tokens == 0:
            self._finish(sequence, sequence.finish_reason or "length")

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._scheduler.remove(sequence)
        if sequence.request.is_finished:
            sequence.request.timings.finished = time.perf_counter()


def _buckets(config: ModelConfig, options: EngineConfig, plan: MemoryPlan) -> Buckets:
    return Buckets(
        rows=power_buckets(1, options.max_num_seqs),
        tokens=power_buckets(MIN_TOKENS_BUCKET, options.max_num_batched_tokens),
        columns=power_buckets(MIN_COLUMNS_BUCKET, plan.max_model_len + MAX_DECODE_STEPS),
        max_pages=-(-plan.max_model_len // plan.page_size),
        page_size=plan.page_size,
        vocab_size=config.vocab_size,
        num_slots=plan.num_pages * plan.page_size,
    )


def _logprobs(scored: Logprobs, at: tuple[int, ...], token_id: int, num_top: int) -> TokenLogprobs:
    ids, values = scored.top_ids[at][:num_top], scored.top[at][:num_top]
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(scored.chosen[at]),
        rank=int(scored.rank[at]),
        top=dict(zip(ids.tolist(), values.tolist(), strict=True)),
    )


def _score_prompt(sequence: Sequence, scored: Logprobs, at: int, count: int) -> None:
    """Add this chunk's prompt log probabilities; flat position t scores the prompt token after it."""
    request = sequence.request
    wants = request.params.prompt_logprobs
    if wants is None or sequence.index > 0:
        return
    if request.prompt_logprobs is None:
        request.prompt_logprobs = [None]  # nothing precedes the first token
    for offset in range(count):
        position = sequence.num_computed + offset + 1
        if position < len(request.prompt_ids):
            request.prompt_logprobs.append(_logprobs(scored, (at + offset,), request.prompt_ids[position], wants))
