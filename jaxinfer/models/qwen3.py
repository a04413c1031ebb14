"""Qwen 3: Qwen 2 with normalised query and key heads, and biases only where asked for."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.llama import llama_fields
from jaxinfer.models.qwen2 import qwen_windows
from jaxinfer.models.registry import Family, Fields, llama_layout


def _translate(hf: Mapping[str, Any]) -> ModelConfig:
    field = Fields(hf)
    attention_bias = field("attention_bias", False)
    config = ModelConfig(
        family="qwen3",
        qk_norm=True,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        windows=qwen_windows(field),
        **llama_fields(field, default_head_dim=128),
    )
    field.finish()
    return config


FAMILY = Family(
    translate=_translate,
    sources=llama_layout,
    inert_tensors=(r".*rotary_emb\.inv_freq", r"lm_head\.weight"),
    prefixes=("model.",),
)
