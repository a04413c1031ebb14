import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from jaxinfer.errors import CheckpointError, UnsupportedModelError
from jaxinfer.io.checkpoint import open_checkpoint
from jaxinfer.io.gguf_header import read_header

WIDTH, FFN, VOCAB, HEADS, KV_HEADS = 32, 64, 48, 4, 2
BASE: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": WIDTH,
    "feed_forward_length": FFN,
    "block_count": 1,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
rng = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def write_gguf(file: Path, arch: str, keys: dict[str, Any], tensors: dict[str, np.ndarray], **plain: Any) -> Path:
    writer = GGUFWriter(file, arch)
    for key, value in keys.items():
        add_key(writer, f"{arch}.{key}", value)
    for key, value in plain.items():
        add_key(writer, key.replace("__", "."), value)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def to_interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Per head: row i of the first half goes to row 2i, of the second to 2i + 1; spelled out as the definition."""
    size = len(weight) // heads
    rows = [head * size + part * size // 2 + i for head in range(heads) for i in range(size // 2) for part in (0, 1)]
    return weight[rows]


HF_LAYER = {
    "self_attn.q_proj.weight": random(WIDTH, WIDTH),
    "self_attn.k_proj.weight": random(WIDTH // 2, WIDTH),
    "self_attn.v_proj.weight": random(WIDTH // 2, WIDTH),
    "self_attn.o_proj.weight": random(WIDTH, WIDTH),
    "mlp.gate_proj.weight": random(FFN, WIDTH),
    "mlp.up_proj.weight": random(FFN, WIDTH),
    "mlp.down_proj.weight": random(WIDTH, FFN),
    "input_layernorm.weight": random(WIDTH),
    "post_attention_layernorm.weight": random(WIDTH),
}
HF_MODEL = {
    "model.embed_tokens.weight": random(VOCAB, WIDTH),
    "model.norm.weight": random(WIDTH),
    **{f"model.layers.0.{name}": value for name, value in HF_LAYER.items()},
}


def own_tensors(hf: dict[str, np.ndarray], arch: str) -> dict[str, np.ndarray]:
    """What llama.cpp's converter writes."""
    names = {"embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    names |= {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
    out = {}
    for name, value in hf.items():
        part = next(p for p in names if f".{p}." in f".{name}")
        if arch == "llama" and part in ("q_proj", "k_proj"):
            value = to_interleaved(value, HEADS if part == "q_proj" else KV_HEADS)
        out[("blk.0." if "layers" in name else "") + names[part] + "." + name.rpartition(".")[2]] = value
    return out


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_hf_names_layout_and_values_come_back(tmp_path: Path, arch: str):
    hf = dict(HF_MODEL)
    if arch == "llama":
        hf["model.layers.0.self_attn.k_proj.bias"] = random(WIDTH // 2)
    if arch == "qwen2":
        hf["model.layers.0.self_attn.q_proj.bias"] = random(WIDTH)
    if arch == "qwen3":
        hf["model.layers.0.self_attn.q_norm.weight"] = random(WIDTH // HEADS)
    file = write_gguf(tmp_path / "m.gguf", arch, BASE, own_tensors(hf, arch))
    with open_checkpoint(file) as checkpoint:
        assert dict(checkpoint.tensor_shapes) == {name: value.shape for name, value in hf.items()}
        for name, value in hf.items():
            np.testing.assert_array_equal(checkpoint.read(name), value, err_msg=name)


def test_gpt2_conv1d_is_given_back_in_hf_orientation(tmp_path: Path):
    keys = {"context_length": 64, "embedding_length": WIDTH, "feed_forward_length": FFN, "block_count": 1}
    keys |= {"attention.head_count": HEADS, "attention.layer_norm_epsilon": 1e-5}
    c_attn, wte, wpe = random(WIDTH, 3 * WIDTH), random(VOCAB, WIDTH), random(64, WIDTH)
    tensors = {"token_embd.weight": wte, "position_embd.weight": wpe, "blk.0.attn_qkv.weight": c_attn.T.copy()}
    tensors |= {"blk.0.attn_qkv.bias": random(3 * WIDTH), "output.weight": wte}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "gpt2", keys, tensors))
    np.testing.assert_array_equal(checkpoint.read("transformer.h.0.attn.c_attn.weight"), c_attn)
    assert checkpoint.tensor_shapes["transformer.h.0.attn.c_attn.weight"] == (WIDTH, 3 * WIDTH)
    assert checkpoint.tensor_shapes["transformer.h.0.attn.c_attn.bias"] == (3 * WIDTH,)
    np.testing.assert_array_equal(checkpoint.read("transformer.wpe.weight"), wpe)
    expected = {"model_type": "gpt2", "n_embd": WIDTH, "n_layer": 1, "n_head": HEADS, "n_inner": FFN, "n_positions": 64}
    assert checkpoint.config.items() >= expected.items()
    assert checkpoint.config["tie_word_embeddings"] is False


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    writer = GGUFWriter(tmp_path_factory.mktemp("q") / "m.gguf", "llama")
    for key, value in BASE.items():
        add_key(writer, f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", random(VOCAB, WIDTH))
    for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_NL"):
        kind = GGMLQuantizationType[kind]
        try:
            raw = quantize(random(1030, 256), kind)
        except NotImplementedError:  # gguf reads these and can't write them; any bytes are valid but for the scales
            block_bytes = {GGMLQuantizationType.Q4_K: 144, GGMLQuantizationType.Q6_K: 210}.get(kind, 144)
            raw = rng.integers(0, 256, (1030, block_bytes), np.uint8)
            raw[:, -2:] = raw[:, :4:2] = raw[:, 1:4:2] = 17
        shape = raw.shape if raw.dtype == np.uint8 else None
        writer.add_tensor(f"{kind.name}.weight", raw, raw_shape=shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K"])
def test_dequantised_values_equal_ggufs(quantised: Path, kind: str):
    stored = next(t for t in GGUFReader(quantised).tensors if t.name == f"{kind}.weight")
    expected = dequantize(stored.data, stored.tensor_type)
    with open_checkpoint(quantised) as checkpoint:
        values = checkpoint.read(f"{kind}.weight")
    assert values.dtype == np.float32 and values.shape == (1030, 256)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(values, expected)


def test_unimplemented_quantisation_names_tensor_and_type(quantised: Path):
    with pytest.raises(CheckpointError, match=r"IQ4_NL\.weight as IQ4_NL"):
        open_checkpoint(quantised).read("IQ4_NL.weight")


def llama(tmp_path: Path, drop: str = "", tensors: dict[str, np.ndarray] | None = None, **keys: Any) -> dict[str, Any]:
    merged = {key: value for key, value in (BASE | keys).items() if key != drop}
    named = {key.replace("__", "."): value for key, value in merged.items()}
    file = write_gguf(
        tmp_path / "m.gguf", "llama", named, {"token_embd.weight": random(VOCAB, WIDTH)} | (tensors or {})
    )
    return open_checkpoint(file).config


def test_config_is_what_hugging_face_would_have_written(tmp_path: Path):
    assert llama(tmp_path) == {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH // HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    }


def test_rope_scalings_are_translated(tmp_path: Path):
    linear = llama(tmp_path, rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__original_context_length": 64}
    expected = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    assert llama(tmp_path, **yarn)["rope_scaling"] == expected
    factors = np.array([1, 1, 2, 8], np.float32)
    assert llama(tmp_path, tensors={"rope_freqs.weight": factors})["rope_scaling"] == {
        "rope_type": "frequency_factors",
        "factors": [1, 1, 2, 8],
    }


def test_sliding_window_makes_it_mistral(tmp_path: Path):
    config = llama(tmp_path, attention__sliding_window=16)
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 16)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope__scaling__type": "longrope"}, "longrope"),
        ({"expert_count": 8}, "expert_count"),
        ({"attention__scale": 0.5}, r"attention\.scale"),
        ({"attention__head_count_kv": [2, 4]}, "per layer"),
        ({"attention__value_length": 4}, r"attention\.value_length"),
        ({"rope__dimension_count": 4}, r"rope\.dimension_count"),
        ({"brand_new": 1}, "brand_new"),
    ],
)
def test_metadata_that_would_change_the_numbers_is_refused_by_name(tmp_path: Path, keys: dict, message: str):
    with pytest.raises(UnsupportedModelError, match=message):
        llama(tmp_path, **keys)


def test_missing_metadata_and_unknown_architecture_are_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"llama\.block_count"):
        llama(tmp_path, drop="block_count")
    with pytest.raises(UnsupportedModelError, match="'mamba'"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "mamba", {}, {"token_embd.weight": random(VOCAB, WIDTH)}))


def test_end_of_turn_ends_generation_too(tmp_path: Path):
    ids = {"tokenizer__ggml__bos_token_id": 1, "tokenizer__ggml__eos_token_id": 2, "tokenizer__ggml__eot_token_id": 3}
    tensors = {"token_embd.weight": random(VOCAB, WIDTH), "odd.thing": random(2, 2)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", BASE, tensors, **ids))
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 3]}
    assert checkpoint.config["eos_token_id"] == 2
    assert "odd.thing" in checkpoint.tensor_shapes  # for the loader to report


def test_header_equals_what_gguf_reads(quantised: Path):
    reader, header = GGUFReader(quantised), read_header(quantised)
    for name, field in reader.fields.items():
        assert name.startswith("GGUF.") or header.metadata[name] == field.contents()
    for tensor in reader.tensors:
        stored = header.tensors[tensor.name]
        assert (stored.start, stored.num_bytes, stored.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)


@pytest.mark.parametrize("fraction", [0.0, 0.0001, 0.001, 0.3, 0.999999])
def test_truncated_file_is_named(quantised: Path, tmp_path: Path, fraction: float):
    raw = quantised.read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(raw[: int(len(raw) * fraction)])
    with pytest.raises(CheckpointError, match=r"short\.gguf"):
        open_checkpoint(short)


def test_every_cut_of_the_header_is_an_error_of_ours(tmp_path: Path):
    file = write_gguf(
        tmp_path / "m.gguf", "llama", BASE, {"token_embd.weight": random(VOCAB, WIDTH)}, list__x=["a", "b"]
    )
    raw = file.read_bytes()
    for cut in range(0, len(raw) - 1, 61):
        file.write_bytes(raw[:cut])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            read_header(file)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"PK\3\4 not gguf", "must start with 'GGUF'"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 16, "version"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "unknown value type 99"),
    ],
)
def test_foreign_and_corrupt_files_are_named(tmp_path: Path, raw: bytes, message: str):
    file = tmp_path / "m.gguf"
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(file)
