"""What PyTorch and transformers say about a checkpoint: the second opinion the model tests compare with."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# SmolLM2-135M-Instruct's config.json; the GGUF file holds the same values under other names.
SMOLLM2_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "float32",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_logits(folder: str | Path, ids: Sequence[int]) -> np.ndarray:
    """Next-token logits at every position, [S, V] float32."""
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        out = _model(str(folder))(torch.tensor([list(ids)]), use_cache=False)
    return out.logits[0].float().numpy()


def hf_generate(folder: str | Path, ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    """New tokens of greedy generation; the end token, where it is heeded, is the last."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = _model(str(folder))
    prompt = torch.tensor([list(ids)])
    model.generation_config = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=None if ignore_eos else model.config.eos_token_id,
        pad_token_id=0,
    )
    with torch.inference_mode():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt))
    return out[0, len(ids) :].tolist()


@lru_cache(maxsize=4)
def _model(folder: str) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, attn_implementation="eager", dtype=torch.float32).eval()


def smollm2_folder(gguf_path: str | Path, folder: str | Path) -> Path:
    """Unpack SmolLM2's GGUF file to a Hugging Face folder of float32 weights; does nothing if it is there.

    Written against the `gguf` package's dequantisation alone, none of ours, so that it can judge our reader.
    """
    save_file = pytest.importorskip("safetensors.numpy").save_file
    reader = pytest.importorskip("gguf").GGUFReader(gguf_path)
    folder = Path(folder)
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(_hf_tensor(tensor) for tensor in reader.tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(reader, folder)
    (folder / "config.json").write_text(json.dumps(SMOLLM2_CONFIG, indent=2))
    return folder


def _hf_tensor(tensor: Any) -> tuple[str, np.ndarray]:
    """Name and values of one GGUF tensor as transformers has them."""
    from gguf.quants import dequantize

    values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
    match tensor.name.split("."):
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight", values
        case ["output_norm", "weight"]:
            return "model.norm.weight", values
        case ["blk", index, kind, "weight"]:
            heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(kind)
            if heads:
                values = _unpermute(values, SMOLLM2_CONFIG[heads])
            return f"model.layers.{index}.{_LAYER_NAMES[kind]}.weight", values
    raise AssertionError(f"unexpected tensor {tensor.name}")


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from GGUF's order, (pair, half), back to transformers', (half, pair)."""
    rows, width = weight.shape
    return np.ascontiguousarray(weight.reshape(num_heads, -1, 2, width).swapaxes(1, 2).reshape(rows, width))


def _write_tokenizer(reader: Any, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    read = lambda key: reader.get_field(f"tokenizer.{key}").contents()
    tokens, merges = read("ggml.tokens"), [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    special = [token for token, kind in zip(tokens, read("ggml.token_type"), strict=True) if kind == 3]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {"bos_token": 1, "eos_token": 2, "pad_token": 2, "unk_token": 0}
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    fields |= {name: tokens[token_id] for name, token_id in ids.items()} | {"chat_template": read("chat_template")}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2))
