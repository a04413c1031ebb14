"""GPT-NeoX: Pythia, GPT-NeoX-20B, Dolly 2."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.models.registry import Family, Fields, Source, linear, norm, tensor
from jaxinfer.models.rope import resolve_rope
from jaxinfer.types import LayerParams, Linear, Params


def _translate(hf: Mapping[str, Any]) -> ModelConfig:
    field = Fields(hf)
    num_heads, attention_bias = field("num_attention_heads"), field("attention_bias", True)
    head_dim = field("hidden_size") // num_heads
    config = ModelConfig(
        family="gpt_neox",
        vocab_size=field("vocab_size"),
        hidden_size=field("hidden_size"),
        intermediate_size=field("intermediate_size"),
        num_layers=field("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=field("max_position_embeddings"),
        norm="layer",
        norm_eps=field("layer_norm_eps", 1e-5),
        activation=field.activation("hidden_act"),
        residual="parallel" if field("use_parallel_residual", True) else "pre",
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=True,
        tie_word_embeddings=field("tie_word_embeddings", False),
        rope=resolve_rope(field.rope(), head_dim=head_dim, default_fraction=0.25),
    )
    field.finish()
    return config


def _sources(config: ModelConfig) -> Params:
    width, vocab = config.hidden_size, config.vocab_size
    head = None if config.tie_word_embeddings else linear(("embed_out",), (vocab,), width, bias=False)
    return Params(
        embed=tensor("gpt_neox.embed_in.weight", vocab, width),
        positions=None,
        project_in=None,
        layers=tuple(_layer(config, f"gpt_neox.layers.{index}.") for index in range(config.num_layers)),
        final_norm=norm("gpt_neox.final_layer_norm", width, bias=True),
        project_out=None,
        head=head,
    )


def _layer(config: ModelConfig, at: str) -> LayerParams:
    width, inner = config.hidden_size, config.intermediate_size
    return LayerParams(
        attn_norm=norm(at + "input_layernorm", width, bias=True),
        qkv=_fused_qkv(config, at + "attention.query_key_value"),
        q_norm=None,
        k_norm=None,
        out=linear((at + "attention.dense",), (width,), width, bias=config.out_bias),
        mlp_norm=norm(at + "post_attention_layernorm", width, bias=True),
        up=linear((at + "mlp.dense_h_to_4h",), (inner,), width, bias=True),
        down=linear((at + "mlp.dense_4h_to_h",), (width,), inner, bias=True),
    )


def _fused_qkv(config: ModelConfig, name: str) -> Linear:
    """Stored head by head, each with its query, key and value rows; used as all queries, all keys, all values."""

    def arrange(stored: np.ndarray) -> np.ndarray:
        by_head = stored.reshape(config.num_heads, 3, config.head_dim, *stored.shape[1:])
        return by_head.swapaxes(0, 1).reshape(stored.shape)

    def source(kind: str, *shape: int) -> Any:
        return Source(shape=shape, parts=((f"{name}.{kind}", shape),), arrange=arrange)

    weight = source("weight", config.qkv_dim, config.hidden_size)
    return Linear(weight, source("bias", config.qkv_dim) if config.qkv_bias else None)


FAMILY = Family(
    translate=_translate,
    sources=_sources,
    inert_tensors=(r".*\.attention\.(masked_)?bias", r".*\.rotary_emb\.inv_freq", r"embed_out\.weight"),
    prefixes=("gpt_neox.",),
)
