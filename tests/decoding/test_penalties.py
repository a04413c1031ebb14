import jax
import numpy as np
import pytest
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from jaxinfer.decoding import penalties
from jaxinfer.types import LogitEdits

torch = pytest.importorskip("torch")

add_token, ban_until, edit_logits = map(jax.jit, (penalties.add_token, penalties.ban_until, penalties.edit_logits))
count_tokens = jax.jit(penalties.count_tokens, static_argnames="vocab_size")

B, S, V = 4, 12, 64
PROMPT_LENS = np.array([3, 5, 0, 4], np.int32)
TOTAL_LENS = np.array([7, 5, 2, 12], np.int32)


def make_history():
    history = np.random.default_rng(0).integers(0, 8, (B, S)).astype(np.int32)
    history[:, -1] = [V, V, V, 9]
    return np.where(np.arange(S) < TOTAL_LENS[:, None], history, V).astype(np.int32)


def make_edits(repetition=1.0, presence=0.0, frequency=0.0, bias=0.0):
    row = lambda value: np.full(B, value, np.float32)
    return LogitEdits(row(repetition), row(presence), row(frequency), np.full((B, V), bias, np.float32))


def make_logits():
    return np.random.default_rng(1).normal(0, 3, (B, V)).astype(np.float32)


def counts_of(history, prompt_lens=PROMPT_LENS, total_lens=TOTAL_LENS):
    return count_tokens(history, prompt_lens, total_lens, vocab_size=V)


def test_counts_equal_bincount():
    history = make_history()
    counts = counts_of(history)
    for b in range(B):
        prompt, output = history[b, : PROMPT_LENS[b]], history[b, PROMPT_LENS[b] : TOTAL_LENS[b]]
        np.testing.assert_array_equal(counts.in_prompt[b], np.bincount(prompt, minlength=V) > 0)
        np.testing.assert_array_equal(counts.in_output[b], np.bincount(output, minlength=V))


def test_adding_tokens_equals_counting_them():
    history = make_history()
    counts = counts_of(history, total_lens=PROMPT_LENS)
    for step in range(S):
        at = np.minimum(PROMPT_LENS + step, S - 1)
        counts = add_token(counts, history[np.arange(B), at], PROMPT_LENS + step < TOTAL_LENS)
    jax.tree.map(np.testing.assert_array_equal, counts, counts_of(history))


def test_repetition_penalty_equals_transformers():
    history, logits = make_history(), make_logits()
    edited = edit_logits(logits, make_edits(repetition=1.7), counts_of(history))
    for b in range(B):
        seen = torch.tensor(history[b, : TOTAL_LENS[b]].astype(np.int64))[None]
        wanted = RepetitionPenaltyLogitsProcessor(1.7)(seen, torch.tensor(logits[b])[None])
        np.testing.assert_allclose(edited[b], wanted[0].numpy(), rtol=1e-6)


def test_presence_and_frequency_penalties_read_output_only():
    counts, logits = counts_of(make_history()), make_logits()
    edited = edit_logits(logits, make_edits(presence=0.5, frequency=0.25), counts)
    in_output = np.asarray(counts.in_output)
    np.testing.assert_allclose(edited, logits - 0.25 * in_output - 0.5 * (in_output > 0), rtol=1e-5, atol=1e-6)


def test_neutral_edits_change_nothing():
    logits = make_logits()
    np.testing.assert_array_equal(edit_logits(logits, make_edits(), counts_of(make_history())), logits)


def test_bias_is_added_after_penalties_and_bans_overrule_everything():
    logits, edits = make_logits(), make_edits(repetition=2.0, bias=3.0)
    edits.bias[:, 10] = -np.inf
    logits[:, 10] = np.finfo(np.float32).max
    edits.repetition_penalty[:] = 1e-3
    edited = np.asarray(edit_logits(logits, edits, counts_of(np.full((B, S), 10, np.int32))))
    assert np.isneginf(edited[:, 10]).all()
    np.testing.assert_allclose(np.delete(edited, 10, 1), np.delete(logits, 10, 1) + 3, rtol=1e-6)


def test_ban_until_bans_stop_ids_of_given_rows_only():
    logits = make_logits()
    stop_ids = np.array([[1, 2, V], [1, V, V], [V, V, V], [63, 0, 0]], np.int32)
    edited = np.asarray(ban_until(logits, stop_ids, np.array([True, False, True, True])))
    wanted = logits.copy()
    wanted[0, [1, 2]] = wanted[3, [63, 0]] = -np.inf
    np.testing.assert_array_equal(edited, wanted)
