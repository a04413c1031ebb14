"""Which sequences run next: prompts first come, first served, then everything that decodes. Never imports jax."""

from collections import deque
from dataclasses import dataclass

from jaxinfer.cache.blocks import BlockManager
from jaxinfer.engine.request import Sequence


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """Prompt chunks to run, `num_tokens[i]` of `sequences[i]`."""

    sequences: list[Sequence]
    num_tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """Sequences to continue, by up to `num_steps` tokens each."""

    sequences: list[Sequence]
    num_steps: int


class Scheduler:
    """Continuous batching: a finished sequence's place and pages go to the next prompt at once.

    A sequence is admitted only when the pool can hold all it may generate, so nothing admitted ever has to stop.
    """

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_decode_steps: int):
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_decode_steps = max_decode_steps
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Something waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out and free its pages."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence.table is not None:
            self._blocks.free(sequence.table)
            sequence.table = None

    def schedule(self) -> PrefillPlan | DecodePlan:
        """The next step's work; prompts go before decoding."""
        self._admit()
        budget = self._max_num_batched_tokens
        sequences, chunks = [], []
        for sequence in self._running:
            chunk = min(sequence.num_uncomputed_prompt, budget)
            if chunk:
                sequences.append(sequence)
                chunks.append(chunk)
                budget -= chunk
        if sequences:
            return PrefillPlan(sequences=sequences, num_tokens=chunks)
        longest = max(sequence.request.max_tokens - len(sequence.output_ids) for sequence in self._running)
        return DecodePlan(sequences=list(self._running), num_steps=min(longest, self._max_decode_steps))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            if not self._blocks.can_allocate(sequence.max_cached_tokens):
                return
            sequence.table = self._blocks.allocate(sequence.max_cached_tokens)
            self._running.append(self._waiting.popleft())
