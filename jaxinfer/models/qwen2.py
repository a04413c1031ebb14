"""Qwen 2 and 2.5: Llama with biases on query, key and value, and windows on the upper layers where asked for."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.llama import llama_fields
from jaxinfer.models.registry import Family, Fields, layer_windows, llama_layout


def qwen_windows(field: Fields) -> tuple[int | None, ...]:
    """Windows of the layers, off unless `use_sliding_window`."""
    window = field("sliding_window", None if field.given("sliding_window") else 4096)
    first = field("max_window_layers", 28)
    return layer_windows(field, window if field("use_sliding_window", False) else None, first=first)


def _translate(hf: Mapping[str, Any]) -> ModelConfig:
    field = Fields(hf)
    field.only("use_mrope", False)
    config = ModelConfig(family="qwen2", qkv_bias=True, windows=qwen_windows(field), **llama_fields(field))
    field.finish()
    return config


FAMILY = Family(
    translate=_translate,
    sources=llama_layout,
    inert_tensors=(r".*rotary_emb\.inv_freq", r"lm_head\.weight"),
    prefixes=("model.",),
)
