import dataclasses
import math

import numpy as np
import pytest

from jaxinfer.errors import RequestError
from jaxinfer.sampling_params import MAX_LOGPROBS, SamplingParams

BAD_FIELDS = [
    ("n", [0, -1, True, 1.0, "1", None]),
    ("temperature", [-0.1, math.nan, math.inf, 1e39, 10**400, True, "1", None]),
    ("top_k", [-2, 1.5, False, 2**31]),
    ("top_p", [0.0, -0.1, 1.1, math.nan, True]),
    ("min_p", [-0.1, 1.1, math.nan]),
    ("repetition_penalty", [0.0, -1.0, 1e-50, math.inf, math.nan]),
    ("presence_penalty", [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.1, 2.1, math.nan]),
    ("logit_bias", [{1: math.inf}, {1: math.nan}, {-1: 1.0}, {"1": 1.0}, {True: 1.0}, {1: "x"}, [1, 2], 3, "ab"]),
    ("allowed_token_ids", [[-1], [1.0], [True], "12", 3]),
    ("bad_token_ids", [[-1], ["1"], {1: 2}]),
    ("min_tokens", [-1, 1.0, None]),
    ("max_tokens", [-1, 1.0, True]),
    ("stop", ["", ["a", ""], [1], 3, None, b"a"]),
    ("stop_token_ids", [[-1], None, 3]),
    ("ignore_eos", [0, None, "yes"]),
    ("seed", [-1, 2**64, 1.0]),
    ("logprobs", [-1, MAX_LOGPROBS + 1, True]),
    ("prompt_logprobs", [-1, MAX_LOGPROBS + 1]),
    ("skip_special_tokens", [1]),
    ("include_stop_str_in_output", [1]),
]


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD_FIELDS for value in values])
def test_values_out_of_range_raise_and_name_field(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert "got" in message and message.count(".") >= 1 and "\n" not in message


def test_every_field_has_a_refused_value():
    assert {name for name, _ in BAD_FIELDS} == {field.name for field in dataclasses.fields(SamplingParams)}


def test_extremes_of_ranges_are_accepted():
    SamplingParams(temperature=0, top_k=-1, top_p=1, min_p=1, presence_penalty=-2, frequency_penalty=2, max_tokens=0)
    SamplingParams(logprobs=0, prompt_logprobs=MAX_LOGPROBS, seed=2**64 - 1, min_tokens=3, max_tokens=3)


def test_values_are_normalised_and_hashable():
    params = SamplingParams(
        temperature=1,
        top_k=-1,
        logit_bias={5: 1, 2: -3.5},
        allowed_token_ids=np.array([3, 3, 1]),
        stop="end",
        stop_token_ids=[7],
        seed=np.int64(3),
    )
    assert (params.temperature, type(params.temperature), params.top_k) == (1.0, float, 0)
    assert params.logit_bias == ((2, -3.5), (5, 1.0))
    assert params.allowed_token_ids == (3, 3, 1)
    assert (params.stop, params.stop_token_ids, params.bad_token_ids) == (("end",), (7,), None)
    again = dataclasses.replace(params, n=1)
    assert again == params and hash(again) == hash(params)


def test_min_tokens_above_max_tokens_raises():
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens, which is 2, got 3"):
        SamplingParams(min_tokens=3, max_tokens=2)


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "bad_token_ids", "stop_token_ids"])
def test_ids_outside_vocabulary_raise(name):
    make = lambda token_id: SamplingParams(**{name: {token_id: 1.0} if name == "logit_bias" else [token_id]})
    make(63).check_ids(64)
    with pytest.raises(RequestError, match=f"{name} .*63, got 64"):
        make(64).check_ids(64)


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 2], "bad_token_ids": [2, 1, 1]}, "bad_token_ids"),
        ({"bad_token_ids": range(64)}, "bad_token_ids"),
        ({"allowed_token_ids": [1, 2], "stop_token_ids": [1], "min_tokens": 1}, "min_tokens"),
        ({"bad_token_ids": range(2, 64), "stop_token_ids": [0, 1], "min_tokens": 1}, "min_tokens"),
    ],
)
def test_nothing_left_to_choose_raises(fields, name):
    with pytest.raises(RequestError, match=f"^{name} must"):
        SamplingParams(**fields).check_ids(64, end_ids=[2])


def test_something_left_to_choose_passes():
    SamplingParams(allowed_token_ids=[1, 2], bad_token_ids=[2]).check_ids(64)
    SamplingParams(bad_token_ids=range(63), min_tokens=4, stop_token_ids=[5]).check_ids(64, end_ids=[70])
