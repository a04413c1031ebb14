"""GGUF metadata to the `config.json` and `generation_config.json` that Hugging Face would have written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.errors import CheckpointError, UnsupportedModelError

ARCHITECTURES = ("gpt2", "llama", "qwen2", "qwen3")

# Keys under the architecture's name that do not change what the model computes.
_INERT = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.orig_ctx_len"})

# Keys that would change it, with the value at which they don't.
_NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "logit_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "use_parallel_residual": False,
}


class _Keys:
    """Metadata under the architecture's name, remembering what was read so that nothing goes unnoticed."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str):
        prefix = f"{architecture}."
        self._path, self._prefix = path, prefix
        self._rest = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}

    def take(self, name: str, default: Any = ...) -> Any:
        """A value; no default makes the key mandatory."""
        value = self._rest.pop(name, default)
        if value is ...:
            raise CheckpointError(f"{self._path} lacks the metadata {self._prefix}{name}")
        if isinstance(value, list):
            raise UnsupportedModelError(
                f"{self._path} gives {self._prefix}{name} per layer, which is not implemented; expected one value"
            )
        return value

    def finish(self) -> None:
        """Refuse what nobody read."""
        for name, value in self._rest.items():
            if name not in _INERT and not (name in _NEUTRAL and value == _NEUTRAL[name]):
                raise UnsupportedModelError(
                    f"{self._path} sets {self._prefix}{name} to {value!r}; "
                    "this may change the numbers and is not implemented"
                )


def hf_config(
    path: Path, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """The `config.json` of a GGUF file.

    Args:
        path: names the file in errors.
        metadata: of the file.
        shapes: of its tensors, by GGUF name.
        rope_factors: contents of `rope_freqs.weight`, divisors of the rotary frequencies.

    Raises:
        CheckpointError: metadata is missing.
        UnsupportedModelError: the architecture, or a setting that would change the numbers, is not implemented.
    """
    architecture = architecture_of(path, metadata)
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(f"{path} is one of {metadata['split.count']} parts; merge them with gguf-split")
    keys = _Keys(path, metadata, architecture)
    translate = _gpt2 if architecture == "gpt2" else _llama
    config = {"model_type": architecture, "vocab_size": _vocab_size(path, shapes)} | translate(keys, shapes)
    if architecture != "gpt2":
        config |= _rope(keys, config, rope_factors)
    elif rope_factors is not None:
        raise UnsupportedModelError(f"{path} holds rope_freqs.weight, which gpt2 has no use for")
    keys.finish()
    config["tie_word_embeddings"] = "output.weight" not in shapes
    return config | special_ids(metadata)


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `generation_config.json` of a GGUF file: the ids that start and end a text."""
    ids = special_ids(metadata)
    ends = eos_ids(metadata)
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends)
    return ids


def eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a text, a turn or a message."""
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of the beginning and the end of a text, where the file gives them."""
    ids = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {name: value for name, value in ids.items() if value is not None}


def architecture_of(path: Path, metadata: Mapping[str, Any]) -> str:
    """The architecture a file names.

    Raises:
        UnsupportedModelError: it is not implemented, or the file holds no model.
    """
    if metadata.get("general.type", "model") != "model":
        raise UnsupportedModelError(f"{path} holds a {metadata['general.type']}, expected a model")
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} is of the GGUF architecture {architecture!r}, which is not implemented; "
            f"expected one of {', '.join(ARCHITECTURES)}"
        )
    return architecture


def _vocab_size(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    num_rows = next(iter(shapes.get("token_embd.weight", ())), None)
    if num_rows is None:
        raise CheckpointError(f"{path} lacks the tensor token_embd.weight; it holds no language model")
    return num_rows


def _llama(keys: _Keys, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Llama, Mistral (which GGUF calls llama), Qwen2 and Qwen3."""
    num_heads = keys.take("attention.head_count")
    hidden_size = keys.take("embedding_length")
    head_dim = keys.take("attention.key_length", hidden_size // num_heads)
    _expect(keys, "attention.value_length", head_dim)
    config = {
        "hidden_size": hidden_size,
        "intermediate_size": keys.take("feed_forward_length"),
        "num_hidden_layers": keys.take("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.take("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(keys.take("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": keys.take("context_length"),
    }
    window = keys.take("attention.sliding_window", None)
    if window:
        config |= {"model_type": "mistral", "sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return config | {name: True for name, tensor in biases.items() if tensor in shapes}


def _gpt2(keys: _Keys, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    width = keys.take("embedding_length")
    num_heads = keys.take("attention.head_count")
    _expect(keys, "attention.head_count_kv", num_heads)
    return {
        "n_embd": width,
        "n_layer": keys.take("block_count"),
        "n_head": num_heads,
        "n_inner": keys.take("feed_forward_length", 4 * width),
        "n_positions": keys.take("context_length"),
        "layer_norm_epsilon": _decimal(keys.take("attention.layer_norm_epsilon")),
        "activation_function": "gelu_new",
    }


def _rope(keys: _Keys, config: Mapping[str, Any], factors: np.ndarray | None) -> dict[str, Any]:
    _expect(keys, "rope.dimension_count", config["head_dim"])
    theta = {"rope_theta": _decimal(keys.take("rope.freq_base", 10000.0))}
    kind = keys.take("rope.scaling.type", None)
    factor = _decimal(keys.take("rope.scaling.factor", keys.take("rope.scale_linear", 0.0)))
    original = keys.take("rope.scaling.original_context_length", None)
    betas = {f"beta_{end}": keys.take(f"rope.scaling.yarn_beta_{end}", None) for end in ("fast", "slow")}
    if kind is None:
        kind = "linear" if factor not in (0.0, 1.0) else "none"
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"rope.scaling.type must be none, linear or yarn, got {kind!r}; not implemented")
    if factors is not None:
        if kind != "none":
            raise UnsupportedModelError(f"rope_freqs.weight beside rope.scaling.type {kind!r} is not implemented")
        return theta | {"rope_scaling": {"rope_type": "frequency_factors", "factors": factors.tolist()}}
    if kind == "none":
        return theta | {"rope_scaling": None}
    if not factor:
        raise CheckpointError(f"rope.scaling.type {kind!r} needs rope.scaling.factor, which the file does not give")
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {"original_max_position_embeddings": original, **betas}
    return theta | {"rope_scaling": {name: value for name, value in scaling.items() if value is not None}}


def _expect(keys: _Keys, name: str, expected: int) -> None:
    value = keys.take(name, expected)
    if value != expected:
        raise UnsupportedModelError(f"GGUF metadata {name} must be {expected} here, got {value}; not implemented")


def _decimal(value: float) -> float:
    """The shortest decimal that a float32 can mean: metadata is float32, config.json decimal."""
    return float(str(np.float32(value)))
