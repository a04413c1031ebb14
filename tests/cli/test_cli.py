"""The `jaxinfer` command on a tiny checkpoint, as a user types it."""

import errno
import json
import sys

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cli import main

PROMPT = "the rain in spain"


@pytest.fixture
def jaxinfer(monkeypatch, capsys, tiny):
    """Run the command; returns exit status, stdout and stderr."""

    def run(*arguments: str, stdin: str | None = None, model: str | None = None) -> tuple[int, str, str]:
        arguments = tuple(str(tiny("llama")) if argument == "TINY" else argument for argument in arguments)
        monkeypatch.setattr(sys, "argv", ["jaxinfer", *arguments])
        lines = iter((stdin or "").splitlines())
        monkeypatch.setattr("builtins.input", lambda _: next_line(lines))
        if stdin is not None:
            monkeypatch.setattr(sys.stdin, "read", lambda: stdin, raising=False)
        status = 0
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def next_line(lines):
    for line in lines:
        return line
    raise EOFError


@pytest.fixture(scope="module")
def expected(tiny) -> str:
    with LLM(tiny("llama"), kv_cache_bytes=1 << 20) as llm:
        return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=10)).text


def test_generate_streams_what_the_library_generates(jaxinfer, expected):
    status, out, err = jaxinfer("generate", PROMPT, "-m", "TINY", "--raw", "--max-tokens", "10")
    assert (status, out) == (0, expected + "\n")
    assert "Loading weights" in err and "Preparing prefill step" in err and "Memory:" in err


def test_generate_reads_standard_input(jaxinfer, expected):
    assert jaxinfer("generate", "-m", "TINY", "--raw", "--max-tokens", "10", stdin=PROMPT)[1] == expected + "\n"


def test_generate_applies_the_chat_template_unless_raw(jaxinfer, tiny):
    with LLM(tiny("llama"), kv_cache_bytes=1 << 20) as llm:
        answer = llm.chat([{"role": "user", "content": PROMPT}], SamplingParams(temperature=0, max_tokens=10)).text
    assert jaxinfer("generate", PROMPT, "-m", "TINY", "--max-tokens", "10")[1] == answer + "\n"


def test_json_holds_samples_logprobs_and_timings(jaxinfer):
    options = (
        "--raw",
        "--json",
        "-n",
        "2",
        "--logprobs",
        "2",
        "--temperature",
        "1",
        "--seed",
        "3",
        "--max-tokens",
        "5",
    )
    status, out, _ = jaxinfer("generate", PROMPT, "-m", "TINY", *options)
    result = json.loads(out)
    assert status == 0 and result["prompt"] == PROMPT and result["timings"]["total"] > 0
    assert [sample["index"] for sample in result["outputs"]] == [0, 1]
    first = result["outputs"][0]
    assert len(first["token_ids"]) == len(first["logprobs"]) == 5 and len(first["logprobs"][0]["top"]) == 2
    assert first["finish_reason"] == "length" and isinstance(first["text"], str)


def test_several_samples_without_json_are_refused(jaxinfer):
    for options in (("-n", "2"), ("--logprobs", "1")):
        status, out, err = jaxinfer("generate", PROMPT, "-m", "TINY", *options)
        assert status == 2 and out == "" and err.startswith("jaxinfer: ") and "--json" in err


def test_json_is_one_line_that_equals_the_library(jaxinfer, tiny):
    options = ("--raw", "--json", "--max-tokens", "10", "--logprobs", "0")
    status, out, _ = jaxinfer("generate", PROMPT, "-m", "TINY", *options)
    with LLM(tiny("llama"), kv_cache_bytes=1 << 20) as llm:
        output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=10, logprobs=0))
    (line,), result = out.splitlines(), json.loads(out, parse_constant=pytest.fail)
    assert status == 0 and line.startswith("{") and result["error"] is None
    sample = result["outputs"][0]
    assert (sample["text"], sample["token_ids"]) == (output.text, output.token_ids)
    assert sample["finish_reason"] == output.finish_reason
    assert [entry["token_id"] for entry in sample["logprobs"]] == output.token_ids
    assert all(entry["logprob"] <= 0 for entry in sample["logprobs"])
    assert result["prompt_token_ids"] == output.prompt_token_ids


def test_an_empty_prompt_is_the_beginning_of_a_text(jaxinfer):
    result = json.loads(jaxinfer("generate", "", "-m", "TINY", "--raw", "--json", "--max-tokens", "2")[1])
    assert result["prompt"] == "" and len(result["prompt_token_ids"]) == 1


def test_a_reader_that_leaves_ends_the_command_quietly(jaxinfer, monkeypatch):
    def leave(*_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    for arguments in (("generate", PROMPT, "--raw", "--max-tokens", "4", "-m"), ("info",)):
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "write", leave)
            status, _, err = jaxinfer(*arguments, "TINY")
        assert status == 1 and "Traceback" not in err and "Broken" not in err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--temperature", "-1"), "temperature"),
        (("--top-p", "2"), "top_p"),
        (("--max-tokens", "-3"), "max_tokens"),
        (("--max-tokens", "4000"), "max_tokens"),
        (("--stop", ""), "stop"),
        (("--seed", "-1"), "seed"),
        (("--dtype", "int3"), "dtype"),
        (("-m", "no-such-model"), "no-such-model"),
        (("-m", "/proc"), "/proc"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_status_2(jaxinfer, options, named):
    status, out, err = jaxinfer("generate", PROMPT, "-m", "TINY", *options)
    complaint = [line for line in err.splitlines() if line.startswith("jaxinfer:")]
    assert status == 2 and out == "" and len(complaint) == 1
    assert named in complaint[0] and "Traceback" not in err


def test_an_almost_right_name_is_answered_with_the_right_one(jaxinfer):
    status, out, err = jaxinfer("info", "smollm2-135m-instuct")
    assert (status, out) == (2, "") and "did you mean smollm2-135m-instruct?" in err


def test_info_refuses_a_context_beyond_the_models(jaxinfer):
    status, out, err = jaxinfer("info", "TINY", "--max-model-len", "129")
    assert (status, out) == (2, "") and "max_model_len must be at most 128" in err


def test_info_shows_parameters_and_the_memory_plan_without_loading(jaxinfer):
    status, out, err = jaxinfer("info", "TINY")
    assert status == 0 and "Loading weights" not in err
    for line in (
        "parameters",
        "KV bytes per token       256",
        "weights",
        "pages",
        "temporaries",
        "longest context 128",
    ):
        assert line in out


def test_chat_keeps_the_conversation_and_survives_a_full_context(jaxinfer):
    options = ("-m", "TINY", "--max-tokens", "4", "--system", "be brief")
    _, expected, _ = jaxinfer("chat", *options, stdin="hi\nbye\n")
    status, out, err = jaxinfer("chat", *options, stdin="hi\n" + "much too long " * 30 + "\nbye\n")
    assert status == 0 and out == expected and out.count("\n") >= 2
    assert err.count("jaxinfer: prompt must leave room") == 1
    assert jaxinfer("chat", *options, stdin="bye\n")[1] != expected.partition("\n")[2], "what was said before counts"


def test_chat_ends_at_an_empty_line(jaxinfer):
    options = ("-m", "TINY", "--max-tokens", "2")
    once = jaxinfer("chat", *options, stdin="hi\n")
    assert once[0] == 0 and jaxinfer("chat", *options, stdin="hi\n\nbye\n")[1] == once[1] != ""
