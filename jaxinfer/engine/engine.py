"""The loop around the steps: schedule, pack, run, hand out tokens."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.blocks import BlockManager
from jaxinfer.cache.pages import init_pages
from jaxinfer.cache.plan import MemoryPlan
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.batch import (
    MIN_CONTEXT_BUCKET,
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
from jaxinfer.steps import decode_step, prefill_step
from jaxinfer.types import Logprobs, Params, StepOutput

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
        self.buckets = _buckets(config, options, plan)

    @property
    def has_work(self) -> bool:
        """Some request is unfinished."""
        return self._scheduler.has_work

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
        for leaf in jax.tree.leaves((self._params, self._kv)):
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
        batch = pack_decode(plan, self.buckets, gather=True)
        gather = batch.block_table.size * self.buckets.page_size <= self._max_gathered_tokens
        if not gather:
            batch = pack_decode(plan, self.buckets, gather=False)
        top = num_logprobs(plan.sequences)
        sampling = pack_sampling(plan.sequences, len(batch.context_lens), self.buckets)
        self._announce("decode", *batch.block_table.shape, gather, top, sampling.edits is None, sampling.stop_ids.shape)
        self._kv, out = decode_step(
            self._params,
            self._kv,
            batch,
            sampling,
            jnp.int32(plan.num_steps),
            config=self._config,
            max_steps=MAX_DECODE_STEPS,
            gather=gather,
            num_logprobs=top,
        )
        out = jax.device_get(out)
        for row, sequence in enumerate(plan.sequences):
            sequence.num_computed += int(out.num_tokens[row])
            self._emit(sequence, out, row)

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
    page_size = plan.page_size
    pages = -(-(plan.max_model_len + MAX_DECODE_STEPS) // page_size)
    return Buckets(
        rows=power_buckets(1, options.max_num_seqs),
        tokens=power_buckets(MIN_TOKENS_BUCKET, options.max_num_batched_tokens),
        pages=power_buckets(max(1, MIN_CONTEXT_BUCKET // page_size), pages),
        page_size=page_size,
        vocab_size=config.vocab_size,
        num_slots=plan.num_pages * page_size,
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
