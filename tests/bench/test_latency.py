"""`jaxinfer bench latency` measures both sides in turn and writes what it found."""

import json
import sys
from pathlib import Path

import jax
import pytest

from jaxinfer import LLM, RequestError
from jaxinfer.bench.latency import Measurement, Peer, Subject, run
from jaxinfer.cli import main

FAKE_PEER = """
import json, sys
print(json.dumps({"peer": "fake"}), flush=True)
for line in sys.stdin:
    kind, *size = line.split()
    print(json.dumps({"seconds": 9.0} if kind == "first" else {"tokens_per_second": float(size[0])}), flush=True)
"""


def twice_as_fast(what: Measurement) -> dict:
    return {"seconds": 4.5} if what.kind == "first" else {"tokens_per_second": 2.0 * what.size}


@pytest.fixture
def peer(tmp_path: Path):
    script = tmp_path / "peer.py"
    script.write_text(FAKE_PEER)
    peer = Peer([sys.executable, str(script)])
    yield peer
    peer.close()


def test_ratios_are_our_speed_over_the_peers(peer):
    seen = []
    what = [Measurement("decode", 8), Measurement("prefill", 1024), Measurement("first")]
    rows = run(twice_as_fast, peer.measure, what, repeats=3, report=seen.append)
    assert peer.description == {"peer": "fake"} and seen == rows
    assert [row["ratio"] for row in rows] == [2.0, 2.0, 2.0]
    assert rows[0]["tokens_per_second"] == 16.0 and rows[0]["peer_tokens_per_second"] == 8.0
    assert rows[2]["seconds"] == 4.5 and rows[2]["peer_seconds"] == 9.0
    assert all(len(row["all"]) == len(row["all_peer"]) == 3 for row in rows)


def test_a_peer_that_dies_is_reported(tmp_path: Path):
    script = tmp_path / "dies.py"
    script.write_text("raise SystemExit(1)")
    with pytest.raises(RuntimeError, match="ended without an answer"):
        Peer([sys.executable, str(script)])


def test_the_subject_measures_decoding_prefill_and_nothing_that_was_refused(tiny):
    with LLM(tiny("llama"), max_num_seqs=2, kv_cache_bytes=1 << 20) as llm:
        subject = Subject(llm, "tiny")
        for what in (Measurement("decode", 2), Measurement("prefill", 16)):
            assert subject.measure(what)["tokens_per_second"] > 0
        with pytest.raises(RequestError, match="200 prompt tokens"):
            subject.measure(Measurement("prefill", 200))


def test_the_first_token_is_that_of_a_new_process_that_works(tiny, monkeypatch, tmp_path: Path):
    cache = jax.config.values["jax_compilation_cache_dir"] or tmp_path
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    with LLM(tiny("llama"), max_num_seqs=1, kv_cache_bytes=1 << 20) as llm:
        assert Subject(llm, str(tiny("llama"))).measure(Measurement("first"))["seconds"] > 0
        with pytest.raises(RuntimeError, match="printed nothing"):
            Subject(llm, "no-such-model").measure(Measurement("first"))


def test_a_benchmark_that_cannot_run_ends_with_one_sentence(tiny, monkeypatch, capsys):
    options = ["-m", str(tiny("llama")), "--batch", "1", "--prefill", "200", "--repeats", "1", "--no-first-token"]
    monkeypatch.setattr(sys, "argv", ["jaxinfer", "bench", "latency", *options])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("jaxinfer: prompt must leave room in a context of 128")


def test_the_command_writes_json(tiny, tmp_path: Path, monkeypatch, capsys):
    output = tmp_path / "result.json"
    options = ["--batch", "1", "--batch", "2", "--prefill", "16", "--repeats", "1", "--no-first-token"]
    arguments = ["jaxinfer", "bench", "latency", "-m", str(tiny("llama")), *options, "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    result = json.loads(output.read_text())
    assert [(row["kind"], row["size"]) for row in result["results"]] == [
        ("decode", 1),
        ("decode", 2),
        ("prefill", 16),
    ]
    assert all(row["tokens_per_second"] > 0 and row["n"] == len(row["all"]) == 1 for row in result["results"])
    assert result["device"] and result["versions"]["jax"] and result["peer"] is None
    assert capsys.readouterr().out.count("tokens/s") == 3
