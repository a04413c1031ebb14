"""GGUF files, dequantised to float32 and given back their Hugging Face names and layout."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxinfer.errors import CheckpointError
from jaxinfer.io.gguf_config import architecture_of, generation_config, hf_config
from jaxinfer.io.gguf_header import StoredTensor, read_header

_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.attn_norm": "model.layers.{}.input_layernorm",
    "blk.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.ffn_down": "model.layers.{}.mlp.down_proj",
}
_GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.attn_norm": "transformer.h.{}.ln_1",
    "blk.attn_qkv": "transformer.h.{}.attn.c_attn",
    "blk.attn_output": "transformer.h.{}.attn.c_proj",
    "blk.ffn_norm": "transformer.h.{}.ln_2",
    "blk.ffn_up": "transformer.h.{}.mlp.c_fc",
    "blk.ffn_down": "transformer.h.{}.mlp.c_proj",
}
_GPT2_CONV1D = re.compile(r"blk\.\d+\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight")
_LLAMA_ROTARY = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")

_KINDS = frozenset(
    GGMLQuantizationType[name] for name in "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
)
_CHUNK = 1 << 18  # values dequantised at once: numpy's temporaries then stay in the processor's cache


class GGUFCheckpoint:
    """A GGUF file that reads like the Hugging Face folder it was converted from.

    Args:
        file: a `.gguf` file.

    Raises:
        CheckpointError: the file is truncated, corrupt or incomplete.
        UnsupportedModelError: its architecture, or a setting that would change the numbers, is not implemented.
    """

    def __init__(self, file: Path):
        self.path = Path(file)
        header = read_header(self.path)
        self._architecture = architecture_of(self.path, header.metadata)
        self._data: np.ndarray | None = np.asarray(np.memmap(self.path, np.uint8, mode="r"))
        stored = dict(header.tensors)
        rope_freqs = stored.pop("rope_freqs.weight", None)
        factors = self._dequantise("rope_freqs.weight", rope_freqs) if rope_freqs else None
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        self.config: dict[str, Any] = hf_config(self.path, header.metadata, shapes, factors)
        self.generation_config: dict[str, Any] = generation_config(header.metadata)
        self._tensors = {self._hf_name(name): (name, tensor) for name, tensor in stored.items()}

    @property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by Hugging Face name; those without one keep their own."""
        return {
            name: tensor.shape[::-1] if self._is_transposed(own_name) else tensor.shape
            for name, (own_name, tensor) in self._tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        """One tensor in float32.

        Raises:
            CheckpointError: there is no such tensor, its quantisation is not implemented, or the checkpoint is closed.
        """
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} holds no tensor named {name!r}")
        own_name, tensor = self._tensors[name]
        values = self._dequantise(own_name, tensor)
        if self._is_transposed(own_name):
            return values.T
        rotary = _LLAMA_ROTARY.fullmatch(own_name) if self._architecture == "llama" else None
        if rotary:
            heads = self.config["num_attention_heads" if rotary[1] == "q" else "num_key_value_heads"]
            return _undo_rotary_order(values, heads)
        return values

    def close(self) -> None:
        """Let go of the file; arrays already read stay valid."""
        self._data = None

    def __enter__(self) -> "GGUFCheckpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _dequantise(self, name: str, tensor: StoredTensor) -> np.ndarray:
        if self._data is None:
            raise CheckpointError(f"{self.path} is closed; open it again to read {name}")
        if tensor.kind not in _KINDS:
            raise CheckpointError(
                f"{self.path} stores {name} as {tensor.kind.name}, "
                "which is not implemented; use a Q4_K, Q6_K or Q8_0 file"
            )
        raw = self._data[tensor.start : tensor.start + tensor.num_bytes]
        if tensor.kind == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(tensor.shape)
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        blocks = raw.reshape(-1, block_bytes)
        values = np.empty((len(blocks), block), np.float32)
        step = _CHUNK // block
        for start in range(0, len(blocks), step):
            chunk = blocks[start : start + step].reshape(1, -1)
            values[start : start + step] = dequantize(chunk, tensor.kind).reshape(-1, block)
        return values.reshape(tensor.shape)

    def _is_transposed(self, own_name: str) -> bool:
        """GPT-2's Conv1D weights are [in, out] at Hugging Face and [out, in] in GGUF."""
        return self._architecture == "gpt2" and _GPT2_CONV1D.fullmatch(own_name) is not None

    def _hf_name(self, own_name: str) -> str:
        names = _GPT2_NAMES if self._architecture == "gpt2" else _LLAMA_NAMES
        stem, _, suffix = own_name.rpartition(".")
        block = _BLOCK.fullmatch(stem)
        pattern = names.get(f"blk.{block[2]}" if block else stem)
        if pattern is None or suffix not in ("weight", "bias"):
            return own_name
        return f"{pattern.format(block[1] if block else '')}.{suffix}"


def _undo_rotary_order(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from interleaved pairs, as llama.cpp rotates them, back to two halves."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
