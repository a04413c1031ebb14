"""SmolLM2-135M-Instruct against transformers, in float32: the same ids, the same probabilities."""

from collections.abc import Iterator

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from tests.oracle import hf_logits

NEW_TOKENS = 48
LOGPROB_TOLERANCE = 1e-3

CHATS = [
    "Why is the sky blue?",
    "Write a haiku about autumn leaves.",
    "Explain gravity to a five-year-old.",
    "What is 17 + 25? Answer with the number only.",
    "Translate 'good morning' to French, German and Spanish.",
    "List three uses of a paper clip.",
    "Who wrote Pride and Prejudice?",
    "Schreibe einen Satz über Berge. 🏔️",
    "Fix this code: `for i in range(10) print(i)`",
    "Summarise: " + "The quick brown fox jumps over the lazy dog. " * 8,
]
RAW = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.",
    "1, 2, 3, 4, 5, 6,",
    "日本の首都は",
    "Москва — это",
    "naïve café résumé – “quotes” …",
    "🙂🙃 emoji",
    "\n\n\t  ",
    "a",
    "Long story. " + "It rained and rained, and the river rose over the old stone bridge near the mill. " * 38,
]


@pytest.fixture(scope="module")
def llm(smollm2_path) -> Iterator[LLM]:
    with LLM(smollm2_path, max_num_seqs=8, max_num_batched_tokens=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    chats = [llm.tokenizer.chat_ids([{"role": "user", "content": text}]) for text in CHATS]
    ids = chats + [llm.tokenizer.encode(text) for text in RAW]
    assert max(map(len, ids)) >= 700 and len(ids) >= 20
    return ids


def test_greedy_ids_and_logprobs_equal_transformers(llm: LLM, prompts, smollm2_hf):
    """One pass of transformers over prompt and answer: greedy means that each of its argmaxes is our next id."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0))
    for ids, output in zip(prompts, outputs, strict=True):
        logits = hf_logits(smollm2_hf, ids + output.token_ids)[len(ids) - 1 : -1]
        assert output.token_ids == logits.argmax(-1).tolist()
        shifted = logits - logits.max(-1, keepdims=True)
        expected = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        scores = [entry.logprob for entry in output.outputs[0].logprobs or []]
        assert scores == pytest.approx(expected[np.arange(NEW_TOKENS), output.token_ids], abs=LOGPROB_TOLERANCE)


def test_batches_equal_solo_runs(llm: LLM, prompts):
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, seed=11)
    together = llm.generate(prompts[:8], params)
    assert [o.token_ids for o in together] == [llm.generate(ids, params).token_ids for ids in prompts[:8]]


def test_the_answer_about_the_sky_mentions_rayleigh(llm: LLM):
    output = llm.chat([{"role": "user", "content": CHATS[0]}], SamplingParams(temperature=0, max_tokens=64))
    assert "Rayleigh scattering" in output.text
