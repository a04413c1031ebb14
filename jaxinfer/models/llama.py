"""Llama 1 to 3 and its kin: CodeLlama, Vicuna, TinyLlama, SmolLM2."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.registry import Family, Fields, llama_layout
from jaxinfer.models.rope import resolve_rope


def llama_fields(field: Fields, *, default_head_dim: int | None = None) -> dict[str, Any]:
    """ModelConfig fields that Llama and the families that follow it read alike.

    Args:
        field: reader of the `config.json`.
        default_head_dim: where the file gives none; None is the width over the heads.
    """
    num_heads = field("num_attention_heads")
    head_dim = field("head_dim", default_head_dim or field("hidden_size") // num_heads)
    return {
        "vocab_size": field("vocab_size"),
        "hidden_size": field("hidden_size"),
        "intermediate_size": field("intermediate_size"),
        "num_layers": field("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": field("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": field("max_position_embeddings"),
        "norm": "rms",
        "norm_eps": field("rms_norm_eps", 1e-6),
        "activation": field.activation("hidden_act"),
        "gated_mlp": True,
        "tie_word_embeddings": field("tie_word_embeddings", False),
        "rope": resolve_rope(field.rope(), head_dim=head_dim),
    }


def _translate(hf: Mapping[str, Any]) -> ModelConfig:
    field = Fields(hf)
    attention_bias = field("attention_bias", False)
    field.only("rope_interleaved", False)
    config = ModelConfig(
        family="llama",
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=field("mlp_bias", False),
        **llama_fields(field),
    )
    field.finish()
    return config


FAMILY = Family(
    translate=_translate,
    sources=llama_layout,
    inert_tensors=(r".*rotary_emb\.inv_freq", r"lm_head\.weight"),
    prefixes=("model.",),
)
