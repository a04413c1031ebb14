"""OPT and Galactica."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.registry import Family, Fields, linear, norm, tensor
from jaxinfer.types import LayerParams, Params


def _translate(hf: Mapping[str, Any]) -> ModelConfig:
    field = Fields(hf)
    width, num_heads = field("hidden_size"), field("num_attention_heads")
    embed_dim, bias = field("word_embed_proj_dim", width), field("enable_bias", True)
    norm_before, no_final_norm = field("do_layer_norm_before", True), field("_remove_final_layer_norm", False)
    field.only("layer_norm_elementwise_affine", True)
    config = ModelConfig(
        family="opt",
        vocab_size=field("vocab_size"),
        hidden_size=width,
        intermediate_size=field("ffn_dim"),
        num_layers=field("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=width // num_heads,
        max_position_embeddings=field("max_position_embeddings"),
        norm="layer",
        norm_eps=1e-5,
        activation=field.activation("activation_function"),
        residual="pre" if norm_before else "post",
        final_norm=norm_before and not no_final_norm,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tie_word_embeddings=field("tie_word_embeddings", True),
        embed_dim=None if embed_dim == width else embed_dim,
        position_offset=2,  # the table's first rows belonged to fairseq's padding
    )
    field.finish()
    return config


def _sources(config: ModelConfig) -> Params:
    at, width, vocab = "model.decoder.", config.hidden_size, config.vocab_size
    embed_dim = config.embed_dim or width
    project_in = linear((at + "project_in",), (width,), embed_dim, bias=False)
    project_out = linear((at + "project_out",), (embed_dim,), width, bias=False)
    return Params(
        embed=tensor(at + "embed_tokens.weight", vocab, embed_dim),
        positions=tensor(at + "embed_positions.weight", config.num_position_rows, width),
        project_in=project_in if config.embed_dim else None,
        layers=tuple(_layer(config, f"{at}layers.{index}.") for index in range(config.num_layers)),
        final_norm=norm(at + "final_layer_norm", width, bias=True) if config.final_norm else None,
        project_out=project_out if config.embed_dim else None,
        head=None if config.tie_word_embeddings else linear(("lm_head",), (vocab,), embed_dim, bias=False),
    )


def _layer(config: ModelConfig, at: str) -> LayerParams:
    width, inner, attn = config.hidden_size, config.intermediate_size, at + "self_attn."
    qkv = (attn + "q_proj", attn + "k_proj", attn + "v_proj")
    return LayerParams(
        attn_norm=norm(at + "self_attn_layer_norm", width, bias=True),
        qkv=linear(qkv, (width,) * 3, width, bias=config.qkv_bias),
        q_norm=None,
        k_norm=None,
        out=linear((attn + "out_proj",), (width,), width, bias=config.out_bias),
        mlp_norm=norm(at + "final_layer_norm", width, bias=True),
        up=linear((at + "fc1",), (inner,), width, bias=config.mlp_bias),
        down=linear((at + "fc2",), (width,), inner, bias=config.mlp_bias),
    )


FAMILY = Family(
    translate=_translate,
    sources=_sources,
    inert_tensors=(r"lm_head\.weight",),
    prefixes=("model.", "model.decoder."),
)
