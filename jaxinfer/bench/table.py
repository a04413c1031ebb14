"""Benchmark results as the README shows them."""

from typing import Any

_LABELS = {"decode": "decode, batch {size}", "prefill": "prefill, {size} tokens", "first": "new process to first token"}


def render(result: dict[str, Any]) -> str:
    """A Markdown table of what `jaxinfer bench latency --output` wrote."""
    peer = result["peer"]["peer"] if result.get("peer") else None
    lines = [f"| | jaxinfer | {peer} | ratio |", "|---|---|---|---|"] if peer else ["| | jaxinfer |", "|---|---|"]
    for row in result["results"]:
        key, unit = ("seconds", "s") if row["kind"] == "first" else ("tokens_per_second", "tokens/s")
        cells = [_LABELS[row["kind"]].format(**row), f"{row[key]:.3g} {unit}"]
        if peer:
            cells += [f"{row['peer_' + key]:.3g} {unit}", f"{row['ratio']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
