"""`LLM` on tiny checkpoints: what a caller asks for is what comes back."""

import gc
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxinfer import LLM, RequestError, SamplingParams
from jaxinfer.errors import ConfigError, MemoryPlanError
from jaxinfer.steps import decode_step, prefill_step
from tests.oracle import hf_generate, hf_logits
from tests.tiny import EOS_ID, VOCAB_SIZE

PROMPT = "the rain in spain"
OTHERS = ["a", "stays mainly in the plain, " * 3, "héllo wörld"]
LOGPROB_TOLERANCE = 1e-4  # float32 logits of spread 1 from products summed in another order
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny) -> Iterator[LLM]:
    with LLM(tiny("llama"), max_num_seqs=4, max_num_batched_tokens=32, kv_cache_bytes=1 << 20) as llm:
        yield llm


def sampled(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 12, "seed": 7, "ignore_eos": True, **fields})


def test_greedy_generation_equals_transformers(llm: LLM, tiny):
    for prompt in [PROMPT, *OTHERS]:
        output = llm.generate(prompt, GREEDY)
        assert output.token_ids == hf_generate(tiny("llama"), output.prompt_token_ids, 12)


@pytest.mark.parametrize("name", ["mistral", "qwen3", "gpt_neox", "opt-350m", "gpt2"])
def test_every_kind_of_family_generates_as_transformers_does(name: str, tiny):
    with LLM(tiny(name), max_num_seqs=2, kv_cache_bytes=1 << 20) as llm:
        output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        assert output.token_ids == hf_generate(tiny(name), output.prompt_token_ids, 20)


def test_batches_of_unequal_lengths_equal_their_solo_runs(llm: LLM):
    prompts = [PROMPT, *OTHERS]
    params = [GREEDY, sampled(top_k=20), sampled(top_p=0.8, seed=3), sampled(repetition_penalty=1.3, max_tokens=5)]
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.text for output in together] == [output.text for output in alone]


def test_more_requests_than_places_come_back_in_order(llm: LLM):
    prompts = [f"{i} " * (1 + i % 5) for i in range(11)]
    outputs = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=1 + i) for i in range(11)])
    assert [output.prompt for output in outputs] == prompts
    assert all(len(output.token_ids) <= 1 + i for i, output in enumerate(outputs))


def test_prompts_longer_than_a_prefill_step_are_chunked_without_effect(llm: LLM, tiny):
    ids = np.random.default_rng(0).integers(4, VOCAB_SIZE, 90).tolist()
    assert llm.generate(ids, GREEDY).token_ids == hf_generate(tiny("llama"), ids, 12)


def test_token_ids_and_text_are_the_same_prompt(llm: LLM):
    ids = llm.tokenizer.encode(PROMPT)
    assert llm.generate(ids, GREEDY).token_ids == llm.generate(PROMPT, GREEDY).token_ids
    assert llm.generate([ids, tuple(ids)], GREEDY)[1].token_ids == llm.generate(PROMPT, GREEDY).token_ids


def test_streamed_text_joins_to_the_generated_text(llm: LLM):
    pieces = list(llm.stream(PROMPT, GREEDY))
    assert len(pieces) > 1
    assert "".join(pieces) == llm.generate(PROMPT, GREEDY).text


def test_leaving_a_stream_early_frees_its_pages(llm: LLM):
    limit = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for _ in range(1 + llm.plan.num_cached_tokens // 100):  # would exhaust the pool
        next(llm.stream(PROMPT, limit))
    assert llm.generate(PROMPT, GREEDY).token_ids


def test_generate_while_a_stream_is_open_disturbs_neither(llm: LLM):
    stream = llm.stream(PROMPT, GREEDY)
    text = next(stream)
    other = llm.generate(OTHERS[1], GREEDY)
    assert text + "".join(stream) == llm.generate(PROMPT, GREEDY).text
    assert other.token_ids == llm.generate(OTHERS[1], GREEDY).token_ids


def test_chat_uses_the_chat_template(llm: LLM):
    messages = [{"role": "user", "content": "hi"}]
    output = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == llm.tokenizer.chat_ids(messages)
    assert "".join(llm.stream_chat(messages, GREEDY)) == output.text


def test_the_same_seed_gives_the_same_text_and_samples_differ(llm: LLM):
    first, second = (llm.generate(PROMPT, sampled(n=3)) for _ in range(2))
    texts = [sample.text for sample in first.outputs]
    assert texts == [sample.text for sample in second.outputs]
    assert len(set(texts)) == 3
    assert llm.generate(PROMPT, sampled()).text == texts[0]
    assert llm.generate(PROMPT, sampled(seed=8)).text != texts[0]


def test_requests_without_a_seed_differ_but_repeat_with_the_engine_seed(tiny):
    def two() -> list[str]:
        with LLM(tiny("llama"), max_num_seqs=2, kv_cache_bytes=1 << 20, seed=5) as llm:
            return [output.text for output in llm.generate([PROMPT] * 2, sampled(seed=None))]

    texts = two()
    assert texts[0] != texts[1]
    assert texts == two()


def test_logprobs_are_those_of_the_raw_distribution(llm: LLM, tiny):
    output = llm.generate(PROMPT, sampled(logprobs=5, top_k=10, temperature=0.7, frequency_penalty=1.0))
    ids = output.prompt_token_ids + output.token_ids
    expected = log_softmax(hf_logits(tiny("llama"), ids))
    entries = output.outputs[0].logprobs
    assert entries is not None and [entry.token_id for entry in entries] == output.token_ids
    for position, entry in enumerate(entries, len(output.prompt_token_ids) - 1):
        row = expected[position]
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=LOGPROB_TOLERANCE)
        assert entry.rank == 1 + np.sum(row > row[entry.token_id])
        assert list(entry.top) == np.argsort(-row)[:5].tolist()
        assert list(entry.top.values()) == pytest.approx(np.sort(row)[::-1][:5], abs=LOGPROB_TOLERANCE)


def test_max_tokens_zero_scores_the_prompt_across_chunks(llm: LLM, tiny):
    ids = np.random.default_rng(1).integers(4, VOCAB_SIZE, 70).tolist()
    output = llm.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=0))
    expected = log_softmax(hf_logits(tiny("llama"), ids))
    assert output.token_ids == [] and output.finish_reason == "length"
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    scores = [entry.logprob for entry in output.prompt_logprobs[1:] if entry]
    assert scores == pytest.approx(expected[np.arange(69), ids[1:]], abs=LOGPROB_TOLERANCE)
    assert [entry.token_id for entry in output.prompt_logprobs[1:] if entry] == ids[1:]


def test_stop_token_ids_end_the_sequence(llm: LLM):
    free = llm.generate(PROMPT, GREEDY).token_ids
    stopped = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[free[4]]))
    end = free.index(free[4]) + 1
    assert stopped.token_ids == free[:end] and stopped.finish_reason == "stop"


def test_end_of_sequence_stops_unless_ignored(llm: LLM):
    wants_eos = {"logit_bias": {EOS_ID: 100.0}, "temperature": 0, "max_tokens": 6}
    output = llm.generate(PROMPT, SamplingParams(**wants_eos))
    assert (output.token_ids, output.text, output.finish_reason) == ([EOS_ID], "", "stop")
    assert llm.generate(PROMPT, SamplingParams(**wants_eos, ignore_eos=True)).token_ids == [EOS_ID] * 6
    held_off = llm.generate(PROMPT, SamplingParams(**wants_eos, min_tokens=3)).token_ids
    assert EOS_ID not in held_off[:3] and held_off[3] == EOS_ID and len(held_off) == 4


def test_stop_strings_never_show(llm: LLM):
    text = llm.generate(PROMPT, GREEDY).text
    stop = text[len(text) // 2 :][:2]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
    output = llm.generate(PROMPT, params)
    assert output.text == text[: text.index(stop)] and output.finish_reason == "stop"
    assert "".join(llm.stream(PROMPT, params)) == output.text


def test_allowed_and_bad_token_ids_and_bias_act(llm: LLM):
    allowed = [10, 11, 12]
    output = llm.generate(PROMPT, sampled(allowed_token_ids=allowed, bad_token_ids=[11], max_tokens=20))
    assert set(output.token_ids) <= {10, 12}
    assert llm.generate(PROMPT, sampled(logit_bias={50: 90.0})).token_ids == [50] * 12


def test_penalties_act_within_a_run_of_steps(llm: LLM, tiny):
    """Every token is penalised from the step after it, so a huge penalty makes all tokens differ."""
    output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, presence_penalty=2.0))
    ids, logits_of = list(output.prompt_token_ids), lambda ids: hf_logits(tiny("llama"), ids)[-1]
    for token in output.token_ids:
        logits = logits_of(ids)
        seen = ids[len(output.prompt_token_ids) :]
        logits[list(set(seen))] -= 2.0
        assert logits.max() - logits[token] < LOGPROB_TOLERANCE
        ids.append(token)


def test_a_bad_request_in_a_list_harms_no_other(llm: LLM):
    outputs = llm.generate([PROMPT, [VOCAB_SIZE], OTHERS[1]], GREEDY)
    assert isinstance(outputs[1].error, RequestError)
    with pytest.raises(RequestError, match=str(VOCAB_SIZE)):
        _ = outputs[1].text
    assert outputs[0].text == llm.generate(PROMPT, GREEDY).text
    assert outputs[2].text == llm.generate(OTHERS[1], GREEDY).text


def test_mismatched_params_and_streaming_several_samples_are_refused(llm: LLM):
    with pytest.raises(RequestError, match="expected 2, got 1"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="n must be 1"):
        llm.stream(PROMPT, sampled(n=2))
    assert llm.generate([]) == []


def test_contexts_fill_to_the_last_token(tiny):
    with LLM(tiny("llama"), max_model_len=40, max_num_seqs=2, kv_cache_bytes=1 << 20) as llm:
        output = llm.generate([5] * 33, SamplingParams(temperature=0, ignore_eos=True))
        assert len(output.token_ids) == 7 and output.finish_reason == "length"
        with pytest.raises(RequestError, match="max_tokens must be at most 7"):
            llm.generate([5] * 33, SamplingParams(max_tokens=8))


def test_timings_are_ordered(llm: LLM):
    timings = llm.generate(PROMPT, GREEDY).timings
    assert timings is not None
    assert 0 < timings.time_to_first_token < timings.total and timings.tokens_per_second > 0


def test_bfloat16_runs_and_stays_close(tiny):
    with LLM(tiny("llama"), dtype="bfloat16", max_num_seqs=2, kv_cache_bytes=1 << 20) as llm:
        output = llm.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0))
        ids = output.prompt_token_ids
        expected = log_softmax(hf_logits(tiny("llama"), ids))[np.arange(len(ids) - 1), ids[1:]]
        scores = [entry.logprob for entry in (output.prompt_logprobs or []) if entry]
        assert scores == pytest.approx(expected, abs=0.1)  # 8 bits of mantissa through 2 layers
        assert llm.generate(PROMPT, GREEDY).token_ids


def test_a_full_copy_budget_falls_back_to_reading_pages(tiny):
    """Rows too unequal for one rectangle of context decode from the pages, with the same ids."""
    long, short = [7] * 120, [9, 8]
    with LLM(tiny("mistral"), max_num_seqs=4, kv_cache_bytes=1 << 20) as roomy:
        expected = [output.token_ids for output in roomy.generate([short] * 3 + [long[:100]], GREEDY)]
    per_token = 2 * 2 * 2 * 16 * 4
    with LLM(tiny("mistral"), max_num_seqs=4, max_model_len=128, kv_cache_bytes=160 * per_token) as tight:
        outputs = tight.generate([short] * 3 + [long[:100]], GREEDY)
    assert [output.token_ids for output in outputs] == expected


def test_compilations_are_bounded_by_the_bucket_table(tiny):
    prefill_step.clear_cache()
    decode_step.clear_cache()
    with LLM(tiny("llama"), max_num_seqs=4, max_num_batched_tokens=32, kv_cache_bytes=1 << 20) as llm:
        random = np.random.default_rng(0)
        for count in (1, 2, 3, 4, 7):
            prompts = [random.integers(4, VOCAB_SIZE, random.integers(1, 60)).tolist() for _ in range(count)]
            llm.generate(prompts, [sampled(max_tokens=int(random.integers(1, 20)), seed=i) for i in range(count)])
        buckets = llm.buckets
        assert prefill_step._cache_size() <= len(buckets.rows) * len(buckets.tokens)
        assert decode_step._cache_size() <= len(buckets.rows) * len(buckets.columns)
        before = prefill_step._cache_size(), decode_step._cache_size()
        llm.generate([PROMPT, *OTHERS], GREEDY)
        llm.generate([PROMPT, *OTHERS], [sampled(temperature=0.5), sampled(top_k=3), sampled(min_p=0.1), GREEDY])
        assert (prefill_step._cache_size(), decode_step._cache_size()) == before


def test_closing_frees_the_device_memory(tiny):
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    with LLM(tiny("llama"), max_num_seqs=2, kv_cache_bytes=1 << 20) as llm:
        llm.generate(PROMPT, GREEDY)
        assert sum(array.nbytes for array in jax.live_arrays() if id(array) not in before) > 1 << 19
    gc.collect()
    left = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
    assert left < 1 << 14
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(PROMPT, GREEDY)


def test_bad_engine_options_are_refused_by_name(tiny):
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(tiny("llama"), max_num_seqs=0)
    with pytest.raises(ConfigError, match="dtype"):
        LLM(tiny("llama"), dtype="int3")
    with pytest.raises(MemoryPlanError, match="max_model_len"):
        LLM(tiny("llama"), max_model_len=128, kv_cache_bytes=4096)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
