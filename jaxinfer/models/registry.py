"""What a family must say about itself, and the table of families by `model_type`."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.config import Activation, ModelConfig
from jaxinfer.errors import UnsupportedModelError
from jaxinfer.types import LayerParams, Linear, Norm, Params

MODEL_TYPES = {
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "llama": "llama",
    "mistral": "mistral",
    "opt": "opt",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}

# Keys that cannot change what the model computes at inference.
_INERT_KEYS = frozenset(
    "_name_or_path architectures auto_map bos_token_id eos_token_id pad_token_id unk_token_id torch_dtype dtype "
    "transformers_version transformers.js_config use_cache initializer_range pretraining_tp attention_dropout "
    "hidden_dropout classifier_dropout model_type chunk_size_feed_forward "
    "output_attentions output_hidden_states return_dict is_encoder_decoder id2label label2id problem_type "
    "gradient_checkpointing task_specific_params tokenizer_class init_std is_decoder is_llama_config n_ctx prefix "
    "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout".split()
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one parameter comes from: tensors of the checkpoint, stacked on the first axis."""

    shape: tuple[int, ...]  # of the parameter
    parts: tuple[tuple[str, tuple[int, ...]], ...]  # name and stored shape of each tensor
    arrange: Callable[[np.ndarray], np.ndarray] = lambda stored: stored  # stored layout to ours, part by part


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture as data.

    Attributes:
        translate: `config.json` to ModelConfig; raises UnsupportedModelError for values it cannot honour.
        sources: the parameter tree with a Source at every leaf.
        inert_tensors: regular expressions of tensors that checkpoints carry and inference ignores.
        prefixes: name prefixes that some exporters leave out.
    """

    translate: Callable[[Mapping[str, Any]], ModelConfig]
    sources: Callable[[ModelConfig], Params]
    inert_tensors: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()


def family_of(hf: Mapping[str, Any]) -> Family:
    """The family a `config.json` names.

    Raises:
        UnsupportedModelError: the architecture is not implemented.
    """
    model_type = hf.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"model_type must be one of {', '.join(sorted(MODEL_TYPES))}, got {model_type!r}; "
            "this architecture is not implemented"
        )
    return importlib.import_module(f"jaxinfer.models.{MODEL_TYPES[model_type]}").FAMILY


class Fields:
    """Reads a `config.json` and remembers what was read, so that nothing in it goes unnoticed."""

    def __init__(self, hf: Mapping[str, Any]):
        self._hf = hf
        self._read: set[str] = set()

    def __call__(self, name: str, default: Any = ...) -> Any:
        """The value of a field; absent or null gives the default, and no default makes the field mandatory."""
        self._read.add(name)
        value = self._hf.get(name)
        if value is not None:
            return value
        if default is ...:
            raise UnsupportedModelError(f"config.json must give {name!r}, which is missing or null")
        return default

    def given(self, name: str) -> bool:
        """Whether the file has the field at all, null or not."""
        return name in self._hf

    def only(self, name: str, *accepted: Any) -> None:
        """Refuse any value but these; the first is what an absent field means."""
        value = self(name, accepted[0])
        if value not in accepted:
            raise UnsupportedModelError(
                f"config.json field {name!r} must be one of {list(accepted)}, got {value!r}; "
                "this would change the numbers and is not implemented"
            )

    def activation(self, name: str) -> Activation:
        """One of the decoder's activations, by any name checkpoints use for it."""
        value = self(name)
        if value not in _ACTIVATIONS:
            raise UnsupportedModelError(f"{name} must be one of {', '.join(sorted(_ACTIVATIONS))}, got {value!r}")
        return _ACTIVATIONS[value]

    def rope(self) -> Mapping[str, Any]:
        """The raw config, with every spelling of the rope fields marked as read."""
        self._read |= {"rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct"}
        self._read |= {"partial_rotary_factor", "original_max_position_embeddings"}
        return self._hf

    def finish(self) -> None:
        """Warn of fields nobody read; refuse quantised weights, which need more than these fields."""
        self.only("quantization_config", None)
        unknown = sorted(set(self._hf) - self._read - _INERT_KEYS)
        unknown = [name for name in unknown if not name.endswith(("dropout", "dropout_prob", "pdrop", "layerdrop"))]
        if unknown:
            warnings.warn(f"config.json has fields jaxinfer does not know and ignores: {unknown}", stacklevel=3)


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def tensor(name: str, *shape: int) -> Any:
    """The Source of a parameter stored as it is used; typed as whatever array it stands for."""
    return Source(shape=shape, parts=((name, shape),))


def stacked(names: tuple[str, ...], rows: tuple[int, ...], *rest: int) -> Any:
    """The Source of a parameter made of several tensors on top of each other."""
    parts = tuple((name, (count, *rest)) for name, count in zip(names, rows, strict=True))
    return Source(shape=(sum(rows), *rest), parts=parts)


def linear(names: tuple[str, ...], rows: tuple[int, ...], width: int, *, bias: bool) -> Linear:
    """Sources of a projection fused from several."""
    weight = stacked(tuple(f"{name}.weight" for name in names), rows, width)
    return Linear(weight, stacked(tuple(f"{name}.bias" for name in names), rows) if bias else None)


def norm(name: str, width: int, *, bias: bool) -> Norm:
    """Sources of a norm."""
    return Norm(tensor(f"{name}.weight", width), tensor(f"{name}.bias", width) if bias else None)


_FULL, _SLIDING = "full_attention", "sliding_attention"


def layer_windows(field: Fields, window: int | None, *, first: int) -> tuple[int | None, ...]:
    """`ModelConfig.windows`: as `layer_types` says, else `window` from layer `first` on.

    Raises:
        UnsupportedModelError: `layer_types` holds an unknown type, does not fit the layers or slides without a window.
    """
    num_layers = field("num_hidden_layers")
    default = [_SLIDING if window and layer >= first else _FULL for layer in range(num_layers)]
    types = field("layer_types", default)
    accepted = {_FULL, _SLIDING} if window else {_FULL}
    if len(types) != num_layers or not set(types) <= accepted:
        raise UnsupportedModelError(
            f"layer_types must give each of {num_layers} layers one of {sorted(accepted)}, got {types}; "
            "other types are not implemented, and a sliding one needs sliding_window"
        )
    return tuple(window if kind == _SLIDING else None for kind in types) if _SLIDING in types else ()


def llama_layout(config: ModelConfig) -> Params:
    """Tensor names shared by Llama and the families that follow it."""
    width, head_dim = config.hidden_size, config.head_dim

    def layer(index: int) -> LayerParams:
        at = f"model.layers.{index}."
        attn, mlp = at + "self_attn.", at + "mlp."
        heads = (config.num_heads * head_dim, *[config.num_kv_heads * head_dim] * 2)
        qkv = (attn + "q_proj", attn + "k_proj", attn + "v_proj")
        return LayerParams(
            attn_norm=norm(at + "input_layernorm", width, bias=False),
            qkv=linear(qkv, heads, width, bias=config.qkv_bias),
            q_norm=norm(attn + "q_norm", head_dim, bias=False) if config.qk_norm else None,
            k_norm=norm(attn + "k_norm", head_dim, bias=False) if config.qk_norm else None,
            out=linear((attn + "o_proj",), (width,), heads[0], bias=config.out_bias),
            mlp_norm=norm(at + "post_attention_layernorm", width, bias=False),
            up=linear(
                (mlp + "gate_proj", mlp + "up_proj"), (config.intermediate_size,) * 2, width, bias=config.mlp_bias
            ),
            down=linear((mlp + "down_proj",), (width,), config.intermediate_size, bias=config.mlp_bias),
        )

    return Params(
        embed=tensor("model.embed_tokens.weight", config.vocab_size, width),
        positions=None,
        project_in=None,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=norm("model.norm", width, bias=False),
        project_out=None,
        head=None if config.tie_word_embeddings else linear(("lm_head",), (config.vocab_size,), width, bias=False),
    )
