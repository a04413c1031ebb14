"""Mistral: Llama with a sliding window."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.llama import llama_fields
from jaxinfer.models.registry import Family, Fields, llama_layout


def _translate(hf: Mapping[str, Any]) -> ModelConfig:
    field = Fields(hf)
    window = field("sliding_window", None if field.given("sliding_window") else 4096)
    field.only("layer_types", None)  # transformers ignores it in favour of a window on all layers
    windows = (window,) * field("num_hidden_layers") if window else ()
    config = ModelConfig(family="mistral", windows=windows, **llama_fields(field))
    field.finish()
    return config


FAMILY = Family(
    translate=_translate,
    sources=llama_layout,
    inert_tensors=(r".*rotary_emb\.inv_freq", r"lm_head\.weight"),
    prefixes=("model.",),
)
