from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.cache.blocks import BlockManager
from jaxinfer.engine.batch import (
    LOGPROBS_BUCKETS,
    Buckets,
    num_logprobs,
    num_prompt_logprobs,
    pack_decode,
    pack_prefill,
    pack_sampling,
    power_buckets,
)
from jaxinfer.engine.request import Request, Sequence
from jaxinfer.engine.scheduler import DecodePlan, PrefillPlan
from jaxinfer.sampling_params import SamplingParams

VOCAB, PAGE, NUM_PAGES, MAX_LEN = 50, 4, 64, 48
BUCKETS = Buckets(
    rows=power_buckets(1, 6),
    tokens=power_buckets(16, 200),
    columns=power_buckets(16, MAX_LEN + 8),
    max_pages=MAX_LEN // PAGE,
    page_size=PAGE,
    vocab_size=VOCAB,
    num_slots=PAGE * NUM_PAGES,
)


def sequences_of(*shapes: tuple[int, int, int], stop_ids=(), **params) -> list[Sequence]:
    """Admitted sequences of (prompt tokens, computed tokens, outputs), on shuffled pages."""
    blocks, random = BlockManager(NUM_PAGES, PAGE), np.random.default_rng(0)
    sequences = []
    for num_prompt, num_computed, num_outputs in shapes:
        request = Request(
            prompt_ids=random.integers(1, VOCAB, num_prompt).tolist(),
            params=SamplingParams(**params),
            max_tokens=10,
            stop_ids=stop_ids,
            seed=0,
        )
        sequence = Sequence(request=request, index=0, key_data=(len(sequences), 9), num_computed=num_computed)
        sequence.output_ids = random.integers(1, VOCAB, num_outputs).tolist()
        sequence.table = blocks.allocate(num_prompt + 9)
        random.shuffle(sequence.table.pages)
        sequences.append(sequence)
    return sequences


chunks = st.lists(
    st.integers(1, 30)
    .flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1)))
    .flatmap(lambda pair: st.tuples(st.just(pair[0]), st.just(pair[1]), st.integers(1, pair[0] - pair[1]))),
    min_size=1,
    max_size=6,
)


@given(chunks)
def test_prefill_rows_own_their_tokens_and_padding_writes_nowhere(chunks):
    sequences = sequences_of(*((num_prompt, start, 0) for num_prompt, start, _ in chunks))
    counts = [count for *_, count in chunks]
    batch, next_ids = jax.device_get(pack_prefill(PrefillPlan(sequences=sequences, num_tokens=counts), BUCKETS))
    assert len(batch.context_lens) in BUCKETS.rows and len(batch.token_ids) in BUCKETS.tokens
    assert batch.block_table.shape == (len(batch.context_lens), BUCKETS.max_pages)
    slots = []
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        start, end = batch.cu_q_lens[row : row + 2]
        span = range(sequence.num_computed, sequence.num_computed + count)
        prompt = sequence.request.prompt_ids
        assert end - start == count and batch.context_lens[row] == span.stop
        assert batch.positions[start:end].tolist() == list(span)
        assert batch.token_ids[start:end].tolist() == [prompt[i] for i in span]
        assert next_ids[start:end].tolist() == [(*prompt, 0)[i + 1] for i in span]
        table = batch.block_table[row]
        assert sequence.table and table[: len(sequence.table.pages)].tolist() == sequence.table.pages
        assert batch.slot_mapping[start:end].tolist() == [table[i // PAGE] * PAGE + i % PAGE for i in span]
        slots += batch.slot_mapping[start:end].tolist()
    assert len(set(slots)) == len(slots) and max(slots) < BUCKETS.num_slots
    assert (batch.slot_mapping[sum(counts) :] == BUCKETS.num_slots).all()
    assert (batch.cu_q_lens[len(sequences) :] == sum(counts)).all()
    assert (batch.context_lens[len(sequences) :] == 0).all()


def test_next_ids_look_across_the_end_of_a_chunk():
    (sequence,) = sequences_of((10, 0, 0))
    _, next_ids = pack_prefill(PrefillPlan(sequences=[sequence], num_tokens=[4]), BUCKETS)
    assert next_ids[:5].tolist() == [*sequence.request.prompt_ids[1:5], 0]


def test_decode_rows_hold_the_last_token_at_the_position_it_will_be_written():
    sequences = sequences_of((5, 5, 1), (8, 10, 3), (1, 1, 1))
    batch = jax.device_get(pack_decode(DecodePlan(sequences=sequences, num_steps=8), BUCKETS))
    assert batch.cu_q_lens is None
    assert batch.token_ids.tolist() == [*(sequence.output_ids[-1] for sequence in sequences), 0]
    assert batch.context_lens.tolist() == [6, 11, 2, 0]
    assert batch.positions.tolist() == [5, 10, 1, 0]
    for row, sequence in enumerate(sequences):
        assert sequence.table
        pages = sequence.table.pages
        assert batch.block_table[row].tolist() == pages + [0] * (BUCKETS.max_pages - len(pages))


def test_padding_rows_are_neutral_and_emit_nothing():
    sequences = sequences_of((5, 5, 2), temperature=0.5, top_k=3, top_p=0.4, min_p=0.1, min_tokens=2, stop_ids=(7,))
    batch = pack_sampling(sequences, 4, BUCKETS)
    rows = batch.rows
    assert jax.random.key_data(rows.keys)[0].tolist() == [0, 9]
    for row, expected in (
        (rows.temperature, [0.5, 0, 0, 0]),
        (rows.top_k, [3, VOCAB, VOCAB, VOCAB]),
        (rows.top_p, [np.float32(0.4), 1, 1, 1]),
        (rows.min_p, [np.float32(0.1), 0, 0, 0]),
        (batch.num_outputs, [2, 0, 0, 0]),
        (batch.min_tokens, [2, 0, 0, 0]),
        (batch.max_tokens, [10, 0, 0, 0]),
    ):
        assert row.tolist() == expected
    assert batch.stop_ids[0].tolist() == [7] + [VOCAB] * 7
    assert (batch.stop_ids[1:] == VOCAB).all()
    assert batch.edits is batch.history is batch.prompt_lens is None


def test_top_k_zero_keeps_the_whole_vocabulary():
    assert pack_sampling(sequences_of((5, 5, 2)), 1, BUCKETS).rows.top_k.tolist() == [VOCAB]


def test_many_stop_ids_widen_the_table_by_doubling():
    few, many = sequences_of((5, 5, 1), stop_ids=(1,)) + sequences_of((5, 5, 1), stop_ids=tuple(range(1, 20)))
    stop_ids = pack_sampling([few, many], 2, BUCKETS).stop_ids
    assert stop_ids.shape == (2, 32)
    assert stop_ids[1].tolist() == [*range(1, 20), *[VOCAB] * 13]


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {0: 1.0}},
        {"bad_token_ids": [0]},
        {"allowed_token_ids": [0]},
    ],
)
def test_each_edit_of_one_row_brings_neutral_rows_for_the_others(params):
    plain, edited = sequences_of((3, 3, 1)) + sequences_of((5, 5, 2), **params)
    batch = pack_sampling([plain, edited], 4, BUCKETS)
    assert batch.edits is not None and batch.history is not None and batch.prompt_lens is not None
    for row in (0, 2, 3):
        assert batch.edits.repetition_penalty[row] == 1 and not batch.edits.bias[row].any()
        assert batch.edits.presence_penalty[row] == batch.edits.frequency_penalty[row] == 0
    ids = edited.request.prompt_ids + edited.output_ids
    assert batch.history.shape[1] in BUCKETS.columns
    assert batch.history[1].tolist() == ids + [VOCAB] * (batch.history.shape[1] - len(ids))
    assert batch.prompt_lens.tolist() == [3, 5, 0, 0] and (batch.history[2:] == VOCAB).all()


def test_bias_adds_allows_and_bans():
    params = {"logit_bias": {3: 2.5, 4: -1.0}, "allowed_token_ids": [3, 4, 5], "bad_token_ids": [4]}
    edits = pack_sampling(sequences_of((5, 5, 2), **params), 1, BUCKETS).edits
    assert edits is not None
    finite = {token: float(value) for token, value in enumerate(edits.bias[0]) if value > -np.inf}
    assert finite == {3: 2.5, 5: 0.0}


@pytest.mark.parametrize(
    ("wanted", "bucket"), [(None, None), (0, 0), (1, 1), (2, 5), (5, 5), (6, 20), (20, LOGPROBS_BUCKETS[-1])]
)
def test_logprobs_are_rounded_up_to_a_bucket_of_the_greediest_row(wanted, bucket):
    other = sequences_of((3, 3, 1))
    chosen = sequences_of((3, 3, 1), logprobs=wanted) + sequences_of((3, 3, 1), logprobs=wanted and 1)
    assert num_logprobs(other + chosen) == bucket
    assert num_prompt_logprobs(other + chosen) is None
    assert num_prompt_logprobs(other + sequences_of((3, 3, 1), prompt_logprobs=wanted)) == bucket


@given(smallest=st.integers(1, 64), largest=st.integers(1, 5000))
def test_buckets_double_and_end_at_what_must_fit(smallest, largest):
    sizes = power_buckets(smallest, largest)
    assert sizes[-1] == largest and list(sizes) == sorted(set(sizes))
    assert all(after <= 2 * before for before, after in pairwise(sizes))
    for count in {1, smallest, largest} - {n for n in (1, smallest) if n > largest}:
        size = BUCKETS.fit(sizes, count)
        assert size >= count and all(other < count for other in sizes if other < size)
