"""Loading accounts for every tensor, and never holds much more than the model it makes."""

import json
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.errors import CheckpointError
from jaxinfer.io.checkpoint import open_checkpoint
from jaxinfer.load import load_params, model_config, num_parameters
from jaxinfer.models.registry import Source, family_of

FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
COMMON = {"vocab_size": 48, "max_position_embeddings": 32, "hidden_size": 16, "num_hidden_layers": 2}
CONFIGS = {
    "llama": {
        **COMMON,
        "model_type": "llama",
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
    },
    "gpt_neox": {
        **COMMON,
        "model_type": "gpt_neox",
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "hidden_act": "gelu",
    },
    "opt": {
        **COMMON,
        "model_type": "opt",
        "ffn_dim": 24,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 8,
        "activation_function": "relu",
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 48,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "activation_function": "gelu_new",
    },
}


class MemoryCheckpoint:
    """A checkpoint in memory; `tensors` may be edited before loading."""

    path, generation_config = Path("memory"), {}

    def __init__(self, config, *, dtype=np.float32):
        self.config, self.reads = config, []
        rng = np.random.default_rng(0)
        shapes = dict(part for source in sources(config) for part in source.parts)
        self.tensors = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}

    @property
    def tensor_shapes(self):
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name):
        self.reads.append(name)
        view = self.tensors[name].view()
        view.flags.writeable = False
        return view

    def close(self): ...

    def __enter__(self):
        return self

    def __exit__(self, *exc_info): ...


def sources(config) -> list[Source]:
    family = family_of(config)
    tree = family.sources(family.translate(config))
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Source))


def load(checkpoint, dtype=FLOAT32, **options):
    return load_params(checkpoint, model_config(checkpoint), dtype=dtype, **options)


def assert_equal_params(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_tensor_is_read_once_and_placed(family):
    checkpoint, calls = MemoryCheckpoint(CONFIGS[family]), []
    params = load(checkpoint, progress=lambda *call: calls.append(call))
    assert sorted(checkpoint.reads) == sorted(checkpoint.tensors)
    shapes = [source.shape for source in sources(checkpoint.config)]
    assert [leaf.shape for leaf in jax.tree.leaves(params)] == shapes
    assert calls == [("Loading weights", done, len(shapes)) for done in range(1, len(shapes) + 1)]
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert num_parameters(model_config(checkpoint), family_of(checkpoint.config)) == size


def test_stacked_tensors_keep_their_order():
    checkpoint = MemoryCheckpoint(CONFIGS["llama"])
    layer = load(checkpoint).layers[1]
    part = lambda name: checkpoint.tensors[f"model.layers.1.{name}_proj.weight"]
    np.testing.assert_array_equal(layer.qkv.weight, np.concatenate([part(f"self_attn.{kind}") for kind in "qkv"]))
    np.testing.assert_array_equal(layer.up.weight, np.concatenate([part("mlp.gate"), part("mlp.up")]))


def test_missing_tensors_are_named():
    checkpoint = MemoryCheckpoint(CONFIGS["llama"])
    del checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor\(s\): model\.layers\.1\.mlp\.up_proj\.weight"):
        load(checkpoint)


def test_surplus_tensors_are_named():
    checkpoint = MemoryCheckpoint(CONFIGS["llama"])
    checkpoint.tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias.* no use for"):
        load(checkpoint)
    assert not checkpoint.reads


def test_misshapen_tensors_are_named_with_both_shapes():
    checkpoint = MemoryCheckpoint(CONFIGS["gpt2"])
    name = "transformer.h.0.mlp.c_fc.weight"
    checkpoint.tensors[name] = checkpoint.tensors[name].T
    with pytest.raises(CheckpointError, match=r"h\.0\.mlp\.c_fc\.weight \(expected \[16, 64\], got \[64, 16\]\)"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        ("llama", "model."),
        ("gpt_neox", "gpt_neox."),
        ("opt", "model."),
        ("opt", "model.decoder."),
        ("gpt2", "transformer."),
    ],
)
def test_checkpoints_of_the_bare_model_load_alike(family, prefix):
    whole, bare = MemoryCheckpoint(CONFIGS[family]), MemoryCheckpoint(CONFIGS[family])
    bare.tensors = {name.removeprefix(prefix): tensor for name, tensor in bare.tensors.items()}
    assert_equal_params(load(whole), load(bare))


@pytest.mark.parametrize(
    ("family", "inert"),
    [
        ("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"]),
        ("gpt_neox", ["gpt_neox.layers.1.attention.bias", "gpt_neox.layers.1.attention.masked_bias"]),
        ("gpt_neox", ["gpt_neox.layers.0.attention.rotary_emb.inv_freq", "embed_out.weight"]),
        ("opt", ["lm_head.weight"]),
        ("gpt2", ["transformer.h.0.attn.bias", "h.1.attn.masked_bias", "lm_head.weight"]),
    ],
)
def test_tied_heads_and_buffers_in_the_file_are_ignored(family, inert):
    config = {**CONFIGS[family], "tie_word_embeddings": True}
    plain, laden = MemoryCheckpoint(config), MemoryCheckpoint(config)
    laden.tensors |= {name: np.ones((48, 16), np.float32) for name in inert}
    params = load(laden)
    assert params.head is None and not set(inert) & set(laden.reads)
    assert_equal_params(load(plain), params)


@pytest.mark.parametrize("stored", [np.float16, np.float32, BFLOAT16])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, jnp.dtype(jnp.float16)], ids=str)
def test_parameters_are_cast_once(stored, dtype):
    checkpoint = MemoryCheckpoint(CONFIGS["gpt2"], dtype=stored)
    params = load(checkpoint, dtype)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(params))
    weight = checkpoint.tensors["transformer.h.0.attn.c_attn.weight"]
    np.testing.assert_array_equal(params.layers[0].qkv.weight, weight.T.astype(dtype))


def test_parameters_do_not_alias_the_checkpoint():
    checkpoint = MemoryCheckpoint(CONFIGS["llama"])
    params = load(checkpoint)
    before = jax.tree.map(np.array, params)
    for tensor in checkpoint.tensors.values():
        tensor[...] = 0
    assert_equal_params(params, before)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_peak_memory_is_the_model_and_one_tensor(family, dtype):
    """What numpy allocates is all there is: on CPU the parameters are numpy's buffers, adopted."""
    wider = {"hidden_size": 256, "n_embd": 256, "vocab_size": 1024, "num_hidden_layers": 4, "n_layer": 4}
    wider |= {"intermediate_size": 512, "ffn_dim": 512, "word_embed_proj_dim": 128}
    config = CONFIGS[family]
    checkpoint = MemoryCheckpoint({**config, **{key: wider[key] for key in wider.keys() & config.keys()}})
    tracemalloc.start()
    try:
        params = load(checkpoint, dtype)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = max(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert held >= size  # else the device made copies that tracemalloc does not see
    assert peak <= 1.2 * size + largest


def test_bare_gpt2_folder_loads_from_disk(tiny, tmp_path):
    """As the hub has GPT-2: no prefix, causal masks among the weights."""
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(tiny("gpt2") / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 128, 128), np.float32)
    safetensors.save_file(bare, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tiny("gpt2") / "config.json").read_text())))
    with open_checkpoint(tmp_path) as ours, open_checkpoint(tiny("gpt2")) as theirs:
        assert_equal_params(load(ours), load(theirs))
