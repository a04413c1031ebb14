"""Every family's logits are transformers', however the tokens were cut into steps."""

from typing import NamedTuple

import numpy as np
import pytest

from jaxinfer.config import ModelConfig
from jaxinfer.types import Params
from tests.models.runner import Runner, load_folder
from tests.oracle import hf_logits
from tests.tiny import VARIANTS, VOCAB_SIZE, WINDOW, make_tiny

HF_TOLERANCE = 1e-4  # float32 sums in another order, through 2 or 3 layers, on logits of about 5
OWN_TOLERANCE = 5e-5  # the same, between two cuts of the same tokens
LENGTHS = (1, 15, 16, 17, 31, 32, 33)  # around the page boundaries
ROWS = (44, 20, 9)

SLIDING, FULL = "sliding_attention", "full_attention"
MORE_VARIANTS = {
    "qwen3-layer-types": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": [SLIDING, FULL]}),
    "gpt_neox-tied": ("gpt_neox", {"tie_word_embeddings": True, "hidden_act": "gelu_fast"}),
    "gpt_neox-rope-linear": ("gpt_neox", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "opt-no-final-norm": ("opt", {"_remove_final_layer_norm": True, "activation_function": "gelu"}),
    "opt-untied": ("opt", {"tie_word_embeddings": False, "word_embed_proj_dim": 16}),
    "gpt2-inner": ("gpt2", {"n_inner": 40, "reorder_and_upcast_attn": True}),
    "llama-rope-yarn-mscale": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 4,
                "mscale": 1.5,
                "mscale_all_dim": 0.5,
            }
        },
    ),
}
REFUSED = {"opt-no-affine"}  # tests/models/test_translate.py


class Case(NamedTuple):
    config: ModelConfig
    params: Params
    rows: list[list[int]]
    expected: list[np.ndarray]  # transformers' logits of each row


@pytest.fixture(scope="module", params=sorted(VARIANTS.keys() - REFUSED))
def case(request, tiny) -> Case:
    return _case(tiny(request.param))


def _case(folder) -> Case:
    rng = np.random.default_rng(7)
    rows = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in ROWS]
    config, params = load_folder(folder)
    return Case(config, params, rows, [hf_logits(folder, row) for row in rows])


def _assert_close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def test_whole_prefill_equals_transformers(case):
    for length in LENGTHS:
        runner = Runner(case.config, case.params, seed=length)
        (logits,) = runner.prefill(case.rows[0][:length])
        _assert_close(logits, case.expected[0][:length], HF_TOLERANCE)


def test_chunked_prefill_equals_whole_prefill(case):
    row = case.rows[0]
    (whole,) = Runner(case.config, case.params).prefill(row)
    for cuts in ((1,), (15,), (16,), (17,), (5, 16, 31, 33)):
        runner = Runner(case.config, case.params)
        chunks = [runner.prefill(row[start:end])[0] for start, end in zip((0, *cuts), (*cuts, len(row)), strict=True)]
        _assert_close(np.concatenate(chunks), whole, OWN_TOLERANCE)


def test_decode_steps_equal_whole_prefill(case):
    row = case.rows[0]
    (whole,) = Runner(case.config, case.params).prefill(row)
    runner = Runner(case.config, case.params)
    (prompt,) = runner.prefill(row[:13])
    steps = [runner.decode(token)[0] for token in row[13:]]
    _assert_close(np.concatenate([prompt, steps]), whole, OWN_TOLERANCE)


def test_batch_of_unequal_rows_equals_rows_alone(case):
    together, apart = Runner(case.config, case.params, seed=1), []
    prompts = together.prefill(*(row[:-4] for row in case.rows))
    steps = [together.decode(*tokens) for tokens in zip(*(row[-4:] for row in case.rows), strict=True)]
    for row in case.rows:
        alone = Runner(case.config, case.params, seed=2)
        (prompt,) = alone.prefill(row[:-4])
        apart.append(np.concatenate([prompt, *(alone.decode(token) for token in row[-4:])]))
    for index, expected in enumerate(apart):
        actual = np.concatenate([prompts[index], [logits[index] for logits in steps]])
        _assert_close(actual, expected, OWN_TOLERANCE)
        _assert_close(actual, case.expected[index], HF_TOLERANCE)


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2-window", "gpt2-inverse-layer", "opt-350m"])
@pytest.mark.parametrize("num_steps", [6, 4])
def test_gathered_decode_equals_paged_decode_and_commits_the_same_pages(variant, num_steps, tiny):
    config, params, rows, _ = _case(tiny(variant))
    paged, gathered = Runner(config, params), Runner(config, params)
    for runner in (paged, gathered):
        runner.prefill(*(row[:-6] for row in rows[:2]))
    tokens = np.array([row[-6:][:num_steps] for row in rows[:2]])
    expected = np.stack([paged.decode(*column) for column in tokens.T], axis=1)
    _assert_close(gathered.decode_gathered(tokens, room=6), expected, OWN_TOLERANCE)
    for ours, theirs in zip(gathered.kv.layers, paged.kv.layers, strict=True):
        _assert_close(ours.k, theirs.k, OWN_TOLERANCE)
        _assert_close(ours.v, theirs.v, OWN_TOLERANCE)


@pytest.mark.parametrize("variant", MORE_VARIANTS)
def test_rarer_settings_equal_transformers(variant, tmp_path):
    family, overrides = MORE_VARIANTS[variant]
    config, params, rows, expected = _case(make_tiny(family, tmp_path, **overrides))
    for logits, theirs in zip(Runner(config, params).prefill(*rows), expected, strict=True):
        _assert_close(logits, theirs, HF_TOLERANCE)


def test_window_hides_what_lies_beyond_it(tiny):
    """The oracle alone would not notice if both sides saw too much."""
    config, params, rows, _ = _case(tiny("mistral"))
    changed = [(rows[0][0] + 1) % VOCAB_SIZE, *rows[0][1:]]
    (one,), (other,) = (Runner(config, params).prefill(row) for row in (rows[0], changed))
    reach = config.num_layers * (WINDOW - 1)  # a layer passes a token on this far
    assert not np.allclose(one[reach], other[reach], atol=1e-6)
    np.testing.assert_array_equal(one[reach + 1 :], other[reach + 1 :])


def test_pages_in_another_order_change_nothing(tiny):
    config, params, rows, _ = _case(tiny("llama"))
    one, other = (Runner(config, params, seed=seed).prefill(*rows) for seed in (3, 4))
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)
