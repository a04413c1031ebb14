import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.cache.blocks import BlockManager
from jaxinfer.engine.request import Request, Sequence
from jaxinfer.engine.scheduler import DecodePlan, PrefillPlan, Scheduler
from jaxinfer.sampling_params import SamplingParams

MAX_PROMPT, MAX_TOKENS = 40, 20
TOKEN = 7


@dataclass(frozen=True)
class Arrival:
    """A request as it happens to turn out."""

    num_prompt: int
    max_tokens: int
    num_samples: int = 1
    ends_after: int = MAX_TOKENS  # tokens until a stop, if the limit does not come first
    at_step: int = 0
    aborted_at: int | None = None


arrivals = st.lists(
    st.builds(
        Arrival,
        num_prompt=st.integers(1, MAX_PROMPT),
        max_tokens=st.integers(0, MAX_TOKENS),
        num_samples=st.integers(1, 3),
        ends_after=st.integers(1, MAX_TOKENS),
        at_step=st.integers(0, 20),
        aborted_at=st.none() | st.integers(0, 30),
    ),
    max_size=8,
)


def request_of(num_prompt: int, max_tokens: int, num_samples: int = 1) -> Request:
    request = Request(prompt_ids=[1] * num_prompt, params=SamplingParams(), max_tokens=max_tokens, stop_ids=(), seed=0)
    request.sequences = [Sequence(request=request, index=index) for index in range(num_samples)]
    return request


def sequence_of(num_prompt: int, max_tokens: int = 4) -> Sequence:
    return request_of(num_prompt, max_tokens).sequences[0]


class Simulation:
    """The engine with a model that answers anything; checks every plan."""

    def __init__(self, *, num_pages: int, page_size: int, max_num_seqs: int, budget: int, max_decode_steps: int):
        self.blocks = BlockManager(num_pages, page_size)
        self.num_pages, self.page_size = num_pages, page_size
        self.max_num_seqs, self.budget, self.max_decode_steps = max_num_seqs, budget, max_decode_steps
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_decode_steps=max_decode_steps
        )
        self.added: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.ends_after: dict[Sequence, int] = {}

    def add(self, arrival: Arrival) -> Request:
        request = request_of(arrival.num_prompt, arrival.max_tokens, arrival.num_samples)
        for sequence in request.sequences:
            self.ends_after[sequence] = arrival.ends_after
            self.added.append(sequence)
            self.scheduler.add(sequence)
        return request

    def step(self) -> None:
        plan = self.scheduler.schedule()
        holders = [sequence for sequence in self.added if sequence.table is not None]
        self.admitted += [sequence for sequence in holders if sequence not in self.admitted]
        pages = [page for sequence in holders if sequence.table for page in sequence.table.pages]
        assert len(holders) <= self.max_num_seqs
        assert len(set(pages)) == len(pages) == self.num_pages - self.blocks.num_free_pages
        assert plan.sequences and len(set(plan.sequences)) == len(plan.sequences)
        assert set(plan.sequences) <= set(holders)
        if isinstance(plan, PrefillPlan):
            self._prefill(plan)
        else:
            self._decode(plan, holders)

    def _prefill(self, plan: PrefillPlan) -> None:
        assert sum(plan.num_tokens) <= self.budget
        for sequence, count in zip(plan.sequences, plan.num_tokens, strict=True):
            assert 0 < count <= sequence.num_uncomputed_prompt
            self._compute(sequence, count)
            if not sequence.num_uncomputed_prompt:
                self._emit(sequence, min(1, sequence.request.max_tokens))

    def _decode(self, plan: DecodePlan, holders: list[Sequence]) -> None:
        assert plan.sequences == holders, "decoding leaves nobody out"
        assert 1 <= plan.num_steps <= self.max_decode_steps
        for sequence in plan.sequences:
            assert sequence.output_ids and not sequence.num_uncomputed_prompt
            left = min(sequence.request.max_tokens, self.ends_after[sequence]) - len(sequence.output_ids)
            count = min(plan.num_steps, left)
            self._compute(sequence, count)
            self._emit(sequence, count)

    def _compute(self, sequence: Sequence, count: int) -> None:
        sequence.num_computed += count
        assert sequence.table is not None
        assert sequence.num_computed <= len(sequence.table.pages) * self.page_size, "a write beyond its pages"

    def _emit(self, sequence: Sequence, count: int) -> None:
        for _ in range(count):
            sequence.append(TOKEN, None)
        if sequence.finish_reason or len(sequence.output_ids) >= min(
            sequence.request.max_tokens, self.ends_after[sequence]
        ):
            self.end(sequence, "stop")

    def end(self, sequence: Sequence, reason) -> None:
        sequence.finish_reason = sequence.finish_reason or reason
        self.scheduler.remove(sequence)


@given(
    arrivals=arrivals,
    page_size=st.integers(1, 16),
    spare_pages=st.integers(0, 40),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 64),
    max_decode_steps=st.integers(1, 8),
)
def test_any_mix_of_requests_finishes_within_budget_places_and_pages(
    arrivals, page_size, spare_pages, max_num_seqs, budget, max_decode_steps
):
    num_pages = -(-(MAX_PROMPT + MAX_TOKENS - 1) // page_size) + spare_pages
    simulation = Simulation(
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        budget=budget,
        max_decode_steps=max_decode_steps,
    )
    requests: list[tuple[Arrival, Request]] = []
    dropped: set[Sequence] = set()
    coming = sorted(arrivals, key=lambda arrival: arrival.at_step)
    step, work = 0, sum(a.num_samples * (a.num_prompt + a.max_tokens + 1) for a in arrivals)
    while coming or simulation.scheduler.has_work:
        while coming and coming[0].at_step <= step:
            requests.append((coming[0], simulation.add(coming.pop(0))))
        for arrival, request in requests:
            for sequence in request.sequences if arrival.aborted_at == step else ():
                if not sequence.finish_reason:
                    dropped |= {sequence} - set(simulation.admitted)
                    simulation.end(sequence, "abort")
        if simulation.scheduler.has_work:
            simulation.step()
        step += 1
        assert step <= work + 21, "every step makes progress"
    assert simulation.blocks.num_free_pages == num_pages
    assert all(sequence.finish_reason for sequence in simulation.added)
    assert simulation.admitted == [sequence for sequence in simulation.added if sequence not in dropped]


def test_a_prompt_that_does_not_fit_holds_back_those_behind_it():
    """First come, first served: a short prompt never overtakes a long one for ever."""
    scheduler = Scheduler(BlockManager(4, 4), max_num_seqs=4, max_num_batched_tokens=64, max_decode_steps=8)
    first, long, short = sequence_of(8, 1), sequence_of(12, 1), sequence_of(4, 1)
    for sequence in (first, long, short):
        scheduler.add(sequence)
    assert scheduler.schedule().sequences == [first]
    scheduler.remove(first)
    assert scheduler.schedule().sequences == [long, short]


def test_a_long_prompt_is_cut_to_the_budget_and_the_rest_of_it_goes_to_the_next():
    scheduler = Scheduler(BlockManager(20, 4), max_num_seqs=4, max_num_batched_tokens=10, max_decode_steps=8)
    long, short = sequence_of(15), sequence_of(3)
    scheduler.add(long)
    scheduler.add(short)
    assert scheduler.schedule() == PrefillPlan(sequences=[long], num_tokens=[10])
    long.num_computed = 10
    assert scheduler.schedule() == PrefillPlan(sequences=[long, short], num_tokens=[5, 3])


def test_decoding_runs_no_further_than_the_longest_sequence_needs():
    scheduler = Scheduler(BlockManager(20, 4), max_num_seqs=4, max_num_batched_tokens=64, max_decode_steps=8)
    sequences = [sequence_of(4, max_tokens) for max_tokens in (3, 6)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.schedule()
    for sequence in sequences:
        sequence.num_computed = 4
        sequence.append(TOKEN, None)
    assert scheduler.schedule() == DecodePlan(sequences=sequences, num_steps=5)
    scheduler.remove(sequences[1])
    assert scheduler.schedule() == DecodePlan(sequences=sequences[:1], num_steps=2)


def test_removing_frees_pages_once_whether_waiting_or_running():
    blocks = BlockManager(4, 4)
    scheduler = Scheduler(blocks, max_num_seqs=1, max_num_batched_tokens=64, max_decode_steps=8)
    running, waiting = sequence_of(8), sequence_of(8)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()
    assert running.table is not None and waiting.table is None
    for sequence in (waiting, running, running, waiting, sequence_of(3)):
        scheduler.remove(sequence)
    assert blocks.num_free_pages == 4 and not scheduler.has_work


@pytest.mark.parametrize(
    "module",
    [
        "jaxinfer.engine.scheduler",
        "jaxinfer.engine.request",
        "jaxinfer.engine.outputs",
        "jaxinfer.cache.blocks",
        "jaxinfer.sampling_params",
    ],
)
def test_host_modules_run_without_jax(module):
    code = f"import sys; sys.modules['jax'] = None; import {module}; assert sys.modules['jax'] is None"
    subprocess.run([sys.executable, "-c", code], check=True)
