"""Frozen, hashable configuration: what a jitted step may specialise on."""

import math
from dataclasses import dataclass
from typing import Literal, no_type_check

from jaxinfer.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, resolved to one table of inverse frequencies.

    `models.rope.resolve_rope` turns a checkpoint's `rope_parameters` (or the older `rope_theta` and `rope_scaling`)
    into this; the scaling types themselves do not survive loading.
    """

    inv_freq: tuple[float, ...]  # radians per position, one per rotated pair
    attention_factor: float = 1.0  # multiplies cos and sin (YaRN's temperature)

    @property
    def rotary_dim(self) -> int:
        """Leading channels of each head that are rotated; the rest pass through."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything the decoder's arithmetic depends on. Families are translations into this."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Activation
    gated_mlp: bool = False
    residual: Literal["pre", "post", "parallel"] = "pre"
    final_norm: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    embed_dim: int | None = None  # width of the embedding table where it differs from hidden_size
    rope: RopeConfig | None = None  # None: learned absolute positions
    position_offset: int = 0  # rows skipped at the start of a learned position table
    windows: tuple[int | None, ...] = ()  # tokens a layer may look back on, itself included; empty: no layer has one
    attention_scales: tuple[float, ...] = ()  # per layer; empty: head_dim ** -0.5

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, the query's own included; None sees everything."""
        return self.windows[layer] if self.windows else None

    def attention_scale(self, layer: int) -> float:
        """What a layer multiplies q.k by."""
        return self.attention_scales[layer] if self.attention_scales else 1 / math.sqrt(self.head_dim)

    @property
    def num_position_rows(self) -> int:
        """Rows of the learned position table, 0 under rope."""
        return 0 if self.rope else self.max_position_embeddings + self.position_offset

    @property
    def qkv_dim(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes one cached token takes over all layers: 2 x layers x kv heads x head dim x itemsize."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


@no_type_check  # a type checker at run time must leave wrong types to __post_init__, which names the remedy
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes the user may set; `cache.plan.MemoryPlan` resolves what is left open.

    Attributes:
        dtype: of weights and cache; None is float32 on CPU and bfloat16 elsewhere.
        max_model_len: longest prompt plus output, in tokens; None is the model's context, or what fits.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: prompt tokens in one prefill step.
        page_size: tokens per page.
        kv_cache_bytes: bytes of pages; None is 1 GiB on CPU, else what weights and temporaries leave.

    Raises:
        ConfigError: a value is out of range.
    """

    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 1024
    page_size: int = 16
    kv_cache_bytes: int | None = None

    def __post_init__(self):
        if self.dtype not in (None, *DTYPES):
            raise ConfigError(f"dtype must be None or one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "kv_cache_bytes"):
            value = getattr(self, name)
            optional = name in ("max_model_len", "kv_cache_bytes")
            if not (value is None and optional) and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a positive integer{' or None' * optional}, got {value!r}")
