"""The `jaxinfer` command on a tiny checkpoint, as a user types it."""

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
    assert "Loading weights" in err and "Preparing decode step" in err and "Memory:" in err


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
    status, _, err = jaxinfer("generate", PROMPT, "-m", "TINY", "-n", "2")
    assert status == 2 and "--json" in err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--temperature", "-1"), "temperature"),
        (("--top-p", "2"), "top_p"),
        (("--max-tokens", "-3"), "max_tokens"),
        (("--max-tokens", "4000"), "max_tokens"),
        (("--stop", ""), "stop"),
        (("--dtype", "int3"), "dtype"),
        (("-m", "no-such-model"), "no-such-model"),
        (("-m", "/tmp"), "/tmp"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_status_2(jaxinfer, options, named):
    status, out, err = jaxinfer("generate", PROMPT, "-m", "TINY", *options)
    complaint = [line for line in err.splitlines() if line.startswith("jaxinfer:")]
    assert status == 2 and out == "" and len(complaint) == 1
    assert named in complaint[0] and "Traceback" not in err


def test_an_almost_right_name_is_answered_with_the_right_one(jaxinfer):
    assert "smollm2-135m-instruct" in jaxinfer("info", "smollm2-135m-instuct")[2]


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
    status, out, err = jaxinfer("chat", *options, stdin="hi\n" + "much too long " * 30 + "\nbye\n")
    assert status == 0 and out.count("\n") >= 2
    assert err.count("jaxinfer: prompt must leave room") == 1
