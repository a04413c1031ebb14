"""GPT-2 and DistilGPT-2."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.models.registry import Family, Fields, Source, linear, norm, tensor
from jaxinfer.types import LayerParams, Linear, Params


def _translate(hf: Mapping[str, Any]) -> ModelConfig:
    field = Fields(hf)
    width, num_heads = field("n_embd"), field("n_head")
    field.only("add_cross_attention", False)
    field.only("reorder_and_upcast_attn", False, True)  # softmax is in float32 either way
    config = ModelConfig(
        family="gpt2",
        vocab_size=field("vocab_size"),
        hidden_size=width,
        intermediate_size=field("n_inner", 4 * width),
        num_layers=field("n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=width // num_heads,
        max_position_embeddings=field("n_positions"),
        norm="layer",
        norm_eps=field("layer_norm_epsilon", 1e-5),
        activation=field.activation("activation_function"),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=field("tie_word_embeddings", True),
        attention_scales=_attention_scales(field, width // num_heads),
    )
    field.finish()
    return config


def _attention_scales(field: Fields, head_dim: int) -> tuple[float, ...]:
    is_scaled = field("scale_attn_weights", True)
    by_layer = field("scale_attn_by_inverse_layer_idx", False)
    if is_scaled and not by_layer:
        return ()
    scale = 1 / math.sqrt(head_dim) if is_scaled else 1.0
    return tuple(scale / (layer + 1 if by_layer else 1) for layer in range(field("n_layer")))


def _sources(config: ModelConfig) -> Params:
    at, width, vocab = "transformer.", config.hidden_size, config.vocab_size
    return Params(
        embed=tensor(at + "wte.weight", vocab, width),
        positions=tensor(at + "wpe.weight", config.num_position_rows, width),
        project_in=None,
        layers=tuple(_layer(config, f"{at}h.{index}.") for index in range(config.num_layers)),
        final_norm=norm(at + "ln_f", width, bias=True),
        project_out=None,
        head=None if config.tie_word_embeddings else linear(("lm_head",), (vocab,), width, bias=False),
    )


def _layer(config: ModelConfig, at: str) -> LayerParams:
    width, inner = config.hidden_size, config.intermediate_size
    return LayerParams(
        attn_norm=norm(at + "ln_1", width, bias=True),
        qkv=_conv1d(at + "attn.c_attn", config.qkv_dim, width),
        q_norm=None,
        k_norm=None,
        out=_conv1d(at + "attn.c_proj", width, width),
        mlp_norm=norm(at + "ln_2", width, bias=True),
        up=_conv1d(at + "mlp.c_fc", inner, width),
        down=_conv1d(at + "mlp.c_proj", width, inner),
    )


def _conv1d(name: str, rows: int, width: int) -> Linear:
    """A projection stored as [in, out]."""
    weight: Any = Source(shape=(rows, width), parts=((f"{name}.weight", (width, rows)),), arrange=np.transpose)
    return Linear(weight, tensor(f"{name}.bias", rows))


FAMILY = Family(
    translate=_translate,
    sources=_sources,
    inert_tensors=(r"(.*\.)?attn\.(masked_)?bias", r"lm_head\.weight"),
    prefixes=("transformer.",),
)
