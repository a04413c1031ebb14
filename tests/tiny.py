"""Tiny random checkpoints in the Hugging Face layout, written by transformers: what the model tests load."""

import json
from pathlib import Path
from typing import Any

import pytest

VOCAB_SIZE = 320
BOS_ID, EOS_ID, PAD_ID, ROLE_ID = 0, 1, 2, 3
SPECIAL_TOKENS = ["<bos>", "<eos>", "<pad>", "<role>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<role>{{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<role>assistant\n{% endif %}"
)
WINDOW = 8

_ROPE = {"rope_theta": 100.0}  # so low that a few dozen positions turn every pair
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 1.0}

_COMMON = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
_GATED = {
    **_COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", **_ROPE},
}

# transformers' model_type, and the config that differs from its defaults.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GATED,
    "mistral": {**_GATED, "head_dim": 16, "sliding_window": WINDOW},
    "qwen2": _GATED,
    "qwen3": {**_GATED, "head_dim": 16},
    "gpt_neox": {
        **_COMMON,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, **_ROPE},
    },
    "opt": {
        **_COMMON,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 32,
    },
    "gpt2": {**_COMMON, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128},
}

# Every switch of the decoder, by name: family and what differs from its entry above.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **_ROPE}}),
    "llama-rope-llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", **_LLAMA3, **_ROPE}}),
    "llama-rope-yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", **_YARN, **_ROPE}}),
    "llama-rope-yarn-exact": ("llama", {"rope_parameters": {"rope_type": "yarn", "truncate": False, **_YARN, **_ROPE}}),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-bias": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox-no-bias": ("gpt_neox", {"attention_bias": False}),
    "opt": ("opt", {}),
    "opt-350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt-no-bias": ("opt", {"enable_bias": False}),
    "opt-no-affine": ("opt", {"layer_norm_elementwise_affine": False}),
    "gpt2": ("gpt2", {}),
    "gpt2-inverse-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False}),
}


def make_tiny(family: str, folder: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random float32 model of a family, with a tokenizer, as transformers would.

    Args:
        family: a key of `FAMILIES`.
        folder: created if missing.
        seed: of the weights.
        overrides: fields of the family's transformers config.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    folder = Path(folder)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_variant(name: str, folder: str | Path, *, seed: int = 0) -> Path:
    """Save the model of an entry of `VARIANTS`."""
    family, overrides = VARIANTS[name]
    return make_tiny(family, folder, seed=seed, **overrides)


def randomize(model: Any, seed: int) -> None:
    """Give every parameter a value that matters: no zero bias, no unit norm, logits with a spread of about one."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + noise if is_scale else noise)


def make_tokenizer(folder: str | Path) -> None:
    """Save a byte-level BPE tokenizer of `VOCAB_SIZE` tokens that prepends `<bos>`, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocab, merges = _byte_vocab()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS_ID)]
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{kind}_token": SPECIAL_TOKENS[index] for index, kind in enumerate(("bos", "eos", "pad"))}
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps({**fields, "chat_template": CHAT_TEMPLATE}, indent=2))


def _byte_vocab() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Special tokens, the 256 bytes, and the pairs of frequent letters that fill the rest."""
    from tokenizers import pre_tokenizers

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [(left, right) for right in "etaoinsr" for left in "Ġhtnsrel"]
    merges = pairs[: VOCAB_SIZE - len(tokens)]
    tokens += [left + right for left, right in merges]
    return {token: index for index, token in enumerate(tokens)}, merges
