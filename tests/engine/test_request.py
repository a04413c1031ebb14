import pytest

from jaxinfer.engine.outputs import request_output
from jaxinfer.engine.request import Request, Sequence, TokenLogprobs
from jaxinfer.engine.text import TextStream
from jaxinfer.io.tokenizer import Tokenizer, load_tokenizer
from jaxinfer.sampling_params import SamplingParams
from tests.tiny import EOS_ID


@pytest.fixture(scope="module")
def tokenizer(tiny) -> Tokenizer:
    return load_tokenizer(tiny("llama"))


def sequence_of(tokenizer: Tokenizer, *, max_tokens: int = 100, stop_ids=(EOS_ID,), **fields) -> Sequence:
    params = SamplingParams(**fields)
    request = Request(prompt_ids=[5, 6, 7], params=params, max_tokens=max_tokens, stop_ids=stop_ids, seed=0)
    detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
    stream = TextStream(detokenizer, tuple(params.stop), include_stop=params.include_stop_str_in_output)
    request.sequences = [Sequence(request=request, index=0, stream=stream)]
    return request.sequences[0]


def feed(sequence: Sequence, ids: list[int]) -> tuple[str, str | None, int]:
    """Text, finish reason and tokens taken before it."""
    for token_id in ids:
        sequence.append(token_id, None)
        if sequence.finish_reason:
            break
    return sequence.text, sequence.finish_reason, len(sequence.output_ids)


@pytest.fixture(scope="module")
def ids(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("fields", "tail", "text"),
    [
        ({}, [EOS_ID], "ab"),
        ({"include_stop_str_in_output": True}, [EOS_ID], "ab"),  # a special token has no text
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, [EOS_ID], "ab<eos>"),
        ({"skip_special_tokens": False}, [EOS_ID], "ab"),
    ],
)
def test_an_end_of_sequence_id_ends_it_and_shows_only_if_asked(tokenizer, ids, fields, tail, text):
    assert feed(sequence_of(tokenizer, **fields), [*ids("ab"), *tail, *ids("c")]) == (text, "stop", 3)


def test_a_stop_id_with_text_shows_it_only_if_asked(tokenizer, ids):
    (c,) = ids("c")
    assert feed(sequence_of(tokenizer, stop_ids=(c,)), ids("abcd")) == ("ab", "stop", 3)
    shown = sequence_of(tokenizer, stop_ids=(c,), include_stop_str_in_output=True)
    assert feed(shown, ids("abcd")) == ("abc", "stop", 3)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
def test_a_stop_string_ends_it(tokenizer, ids, include, text):
    sequence = sequence_of(tokenizer, stop=["cd"], include_stop_str_in_output=include)
    assert feed(sequence, ids("abcdz")) == (text, "stop", 4)


def test_the_limit_ends_it_and_shows_what_was_held_back(tokenizer, ids):
    assert feed(sequence_of(tokenizer, max_tokens=3, stop=["cd"]), ids("abcd")) == ("abc", "length", 3)
    euro = ids("€")
    assert feed(sequence_of(tokenizer, max_tokens=3), [*ids("a"), *euro]) == ("a\ufffd", "length", 3)


def test_a_stop_id_shows_what_was_held_back(tokenizer, ids):
    assert feed(sequence_of(tokenizer, stop=["cd"]), [*ids("abc"), EOS_ID]) == ("abc", "stop", 4)


def test_a_stop_at_the_limit_is_a_stop(tokenizer, ids):
    assert feed(sequence_of(tokenizer, max_tokens=2, stop=["b"]), ids("ab")) == ("a", "stop", 2)
    assert feed(sequence_of(tokenizer, max_tokens=3), [*ids("ab"), EOS_ID]) == ("ab", "stop", 3)


def test_stop_strings_wait_for_min_tokens(tokenizer, ids):
    assert feed(sequence_of(tokenizer, stop=["x"], min_tokens=2), ids("xxaxb")) == ("xxa", "stop", 4)
    assert feed(sequence_of(tokenizer, stop=["x"], min_tokens=1), ids("xxb")) == ("x", "stop", 2)


def test_nothing_ends_it_early(tokenizer, ids):
    assert feed(sequence_of(tokenizer), ids("abc")) == ("abc", None, 3)


def test_counts_follow_what_is_computed_and_emitted(tokenizer, ids):
    sequence = sequence_of(tokenizer, max_tokens=4)
    assert (sequence.num_tokens, sequence.num_uncomputed_prompt, sequence.max_cached_tokens) == (3, 3, 6)
    sequence.num_computed = 2
    assert sequence.num_uncomputed_prompt == 1
    feed(sequence, ids("a"))
    sequence.num_computed = 4
    assert (sequence.num_tokens, sequence.num_uncomputed_prompt) == (4, 0)
    assert sequence_of(tokenizer, max_tokens=0).max_cached_tokens == 3


def test_a_request_is_finished_when_all_its_samples_are(tokenizer):
    sequence = sequence_of(tokenizer)
    request = sequence.request
    request.sequences.append(Sequence(request=request, index=1, finish_reason="length"))
    assert not request.is_finished
    sequence.finish_reason = "abort"
    assert request.is_finished


@pytest.mark.parametrize("logprobs", [None, 0])
def test_the_output_shows_logprobs_only_if_asked(tokenizer, ids, logprobs):
    sequence = sequence_of(tokenizer, logprobs=logprobs)
    scores = TokenLogprobs(token_id=ids("a")[0], logprob=-1.0, rank=2, top={})
    sequence.append(ids("a")[0], None if logprobs is None else scores)
    output = request_output(sequence.request)
    assert output.outputs[0].logprobs == (None if logprobs is None else [scores])
    assert (output.text, output.token_ids, output.finish_reason) == ("a", ids("a"), None)


def test_timings_count_from_arrival_and_speed_from_the_first_token(tokenizer, ids):
    sequence = sequence_of(tokenizer)
    assert request_output(sequence.request).timings is None
    feed(sequence, ids("abc"))
    times = sequence.request.timings
    times.arrived, times.first_token, times.finished = 10.0, 12.0, 16.0
    timings = request_output(sequence.request).timings
    assert timings is not None
    assert (timings.time_to_first_token, timings.total, timings.tokens_per_second) == (2.0, 6.0, 0.5)
