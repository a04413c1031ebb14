from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.engine.intake import DEFAULT_MAX_TOKENS, Intake
from jaxinfer.errors import RequestError
from jaxinfer.io.tokenizer import load_tokenizer
from jaxinfer.sampling_params import SamplingParams
from tests.tiny import BOS_ID, EOS_ID, VOCAB_SIZE

MAX_LEN = 300
FREE = SamplingParams()


@pytest.fixture(scope="module")
def intake(tiny) -> Intake:
    tokenizer = load_tokenizer(tiny("llama"))
    return Intake(tokenizer=tokenizer, vocab_size=VOCAB_SIZE, max_model_len=MAX_LEN, eos_ids=(EOS_ID,))


def refusal(intake: Intake, prompt, params=FREE) -> str:
    with pytest.raises(RequestError) as caught:
        intake.request(prompt, params, seed=0)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_text_is_encoded_and_kept(intake):
    request = intake.request("hello", FREE, seed=3)
    assert request.prompt == "hello" and request.prompt_ids == intake.tokenizer.encode("hello")
    assert request.prompt_ids[0] == BOS_ID
    assert (request.seed, request.stop_ids, len(request.sequences)) == (3, (EOS_ID,), 1)


@pytest.mark.parametrize(
    "prompt", [[5, 6], (5, 6), np.array([5, 6]), np.array([5, 6], np.uint8), [np.int64(5), np.array(6)], range(5, 7)]
)
def test_token_ids_come_in_any_integer_clothes(intake, prompt):
    request = intake.request(prompt, FREE, seed=0)
    assert request.prompt is None and request.prompt_ids == [5, 6]
    assert all(type(token_id) is int for token_id in request.prompt_ids)


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ([5, VOCAB_SIZE], VOCAB_SIZE),
        ([5, -1], -1),
        ([5, True], True),
        ([5, np.True_], np.True_),
        ([5, 1.0], 1.0),
        (np.array([5.0, 6.0]), np.float64(5)),
        ([5, "a"], "a"),
        ([5, None], None),
        ([[5, 6]], [5, 6]),
        (np.array([[5, 6]]), np.array([5, 6])),
        (None, None),
        (5, 5),
        (1.5, 1.5),
        (b"hello", b"hello"),
        ({"role": "user"}, {"role": "user"}),
        ([2**70], 2**70),
    ],
    ids=repr,
)
def test_what_is_no_text_and_no_token_ids_is_refused_by_value(intake, prompt, shown):
    message = refusal(intake, prompt)
    assert message.startswith("prompt must be ") and message.endswith(f"got {shown!r}")
    assert f"from 0 to {VOCAB_SIZE - 1}" in message


def test_text_that_is_no_unicode_is_refused(intake):
    assert "surrogate" in refusal(intake, "a\ud800b")


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_the_beginning_of_a_text_where_the_model_knows_one(intake, prompt):
    assert intake.request(prompt, FREE, seed=0).prompt_ids == [BOS_ID]


def test_an_empty_prompt_is_refused_where_nothing_begins_a_text(intake):
    backend = intake.tokenizer.encode
    tokenizer = load_tokenizer_without_bos(intake)
    bare = replace(intake, tokenizer=tokenizer)
    assert backend("") == [BOS_ID] and tokenizer.encode("") == []
    for prompt in ("", [], np.array([], np.int32)):
        assert refusal(bare, prompt).startswith("prompt must hold at least one token, got an empty one")


def load_tokenizer_without_bos(intake: Intake):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    from jaxinfer.io.tokenizer import Tokenizer

    return Tokenizer(Backend(models.BPE(vocab={"a": 0}, merges=[])), bos_id=None, eos_ids=())


@pytest.mark.parametrize("params", [None, {"temperature": 0}, 0.7, SamplingParams])
def test_params_of_another_type_are_refused(intake, params):
    kind = type(params).__name__
    assert refusal(intake, "a", params) == f"params must be a SamplingParams, got {kind}"


@pytest.mark.parametrize(
    ("num_prompt", "fields"), [(MAX_LEN, {}), (MAX_LEN + 1, {"max_tokens": 0}), (MAX_LEN, {"max_tokens": 1})]
)
def test_a_prompt_that_leaves_no_room_is_refused(intake, num_prompt, fields):
    message = refusal(intake, [5] * num_prompt, SamplingParams(**fields))
    assert f"context of {MAX_LEN} tokens, got {num_prompt} prompt tokens" in message
    assert message.startswith("prompt must leave room") and "max_model_len" in message


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens"])
def test_more_tokens_than_the_context_leaves_are_refused_by_name(intake, field):
    message = refusal(intake, [5] * 100, SamplingParams(**{field: MAX_LEN - 99}))
    assert message.startswith(f"{field} must be at most {MAX_LEN - 100}") and message.endswith(f"got {MAX_LEN - 99}")


@pytest.mark.parametrize(
    ("num_prompt", "fields", "limit"),
    [
        (1, {}, DEFAULT_MAX_TOKENS),
        (MAX_LEN - 10, {}, 10),
        (1, {"min_tokens": DEFAULT_MAX_TOKENS + 5}, DEFAULT_MAX_TOKENS + 5),
        (100, {"max_tokens": MAX_LEN - 100}, MAX_LEN - 100),
        (100, {"max_tokens": 3}, 3),
        (MAX_LEN, {"max_tokens": 0}, 0),
    ],
)
def test_max_tokens_defaults_to_256_or_what_the_context_leaves(intake, num_prompt, fields, limit):
    assert intake.request([5] * num_prompt, SamplingParams(**fields), seed=0).max_tokens == limit


@pytest.mark.parametrize("field", ["stop_token_ids", "bad_token_ids", "allowed_token_ids", "logit_bias"])
def test_params_ids_outside_the_vocabulary_are_refused_by_name(intake, field):
    ids = {VOCAB_SIZE: 1.0} if field == "logit_bias" else [VOCAB_SIZE]
    message = refusal(intake, "a", SamplingParams(**{field: ids}))
    assert message.startswith(f"{field} must") and str(VOCAB_SIZE) in message


def test_a_text_that_can_only_end_is_refused_to_go_on(intake):
    ends_only = {"allowed_token_ids": [EOS_ID], "min_tokens": 1}
    assert refusal(intake, "a", SamplingParams(**ends_only)).startswith("min_tokens must be 0")
    intake.request("a", SamplingParams(**ends_only, ignore_eos=True), seed=0)


def test_stop_ids_are_the_models_and_the_callers(intake):
    assert intake.request("a", SamplingParams(stop_token_ids=[9]), seed=0).stop_ids == (EOS_ID, 9)
    assert intake.request("a", SamplingParams(stop_token_ids=[9], ignore_eos=True), seed=0).stop_ids == (9,)


def test_samples_are_numbered_and_share_nothing(intake):
    request = intake.request("a", SamplingParams(n=3, seed=11), seed=0)
    assert [sequence.index for sequence in request.sequences] == [0, 1, 2] and request.seed == 11
    assert len({id(sequence.stream) for sequence in request.sequences}) == 3
