"""What the README says is what the repository holds."""

import json
from pathlib import Path

from jaxinfer.bench.table import render

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_speed_table_is_the_committed_measurement():
    result = json.loads((ROOT / "jaxinfer/bench/results/cpu.json").read_text())
    assert render(result) in README
    assert result["versions"]["jax"] in README and result["peer"]["versions"]["transformers"] in README


def test_every_file_the_reading_order_names_exists():
    section = README.split("## Read the code")[1]
    names = [name for name in section.split("`")[1::2] if "/" in name or name.endswith(".py")]
    missing = [name for name in names if not any((ROOT / folder / name).exists() for folder in (".", "jaxinfer"))]
    folder = ROOT / "pallas_kernels/paged_attention"
    assert [name for name in missing if not (folder / name).exists()] == []


def test_a_result_without_a_peer_is_a_table_of_one_column():
    result = {"peer": None, "results": [{"kind": "first", "size": 1, "seconds": 4.25}]}
    assert render(result).splitlines()[-1] == "| new process to first token | 4.25 s |"
