import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from jaxinfer.io.checkpoint import open_checkpoint

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.weight": np.arange(4).astype(ml_dtypes.bfloat16),
    "c.ids": np.array(7, np.int64),
    "d.empty": np.zeros((0, 4), np.float16),
}


def make_folder(folder: Path, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, make_folder(tmp_path) / "model.safetensors", metadata={"format": "np"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_folder(tmp_path)
    names = sorted(TENSORS)
    weight_map = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({n: TENSORS[n] for n in names if weight_map[n] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_every_tensor_comes_back_in_its_own_dtype(layout: str, request: pytest.FixtureRequest):
    with open_checkpoint(request.getfixturevalue(layout)) as checkpoint:
        assert dict(checkpoint.tensor_shapes) == {name: value.shape for name, value in TENSORS.items()}
        for name, value in TENSORS.items():
            read = checkpoint.read(name)
            assert read.dtype == value.dtype
            np.testing.assert_array_equal(read, value)


def test_arrays_outlive_the_checkpoint_which_reads_no_more(single: Path):
    with open_checkpoint(single) as checkpoint:
        value = checkpoint.read("a.weight")
    np.testing.assert_array_equal(value, TENSORS["a.weight"])
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.read("a.weight")


def test_generation_config_is_read_where_it_exists(single: Path):
    assert open_checkpoint(single).generation_config == {}
    (single / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(single).generation_config == {"eos_token_id": [1, 2]}


def test_unknown_tensor_is_named(single: Path):
    with pytest.raises(CheckpointError, match=r"no tensor named 'lm_head\.weight'"):
        open_checkpoint(single).read("lm_head.weight")


def test_missing_config_is_not_a_model_folder(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match=r"not a model folder: expected config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff\xfe"])
def test_broken_config_is_named(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_quantised_weights_are_refused_by_method(tmp_path: Path):
    make_folder(tmp_path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedModelError, match="gptq"):
        open_checkpoint(tmp_path)


def test_pytorch_weights_ask_for_conversion(tmp_path: Path):
    (make_folder(tmp_path) / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="convert it to safetensors"):
        open_checkpoint(tmp_path)


def test_folder_without_weights_says_what_is_expected(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors"):
        open_checkpoint(make_folder(tmp_path))


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated_file_is_named_at_open(single: Path, keep: int):
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        open_checkpoint(single)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("not json", "corrupt header"),
        ("[]", "corrupt header"),
        ('{"w": {"dtype": "F32", "shape": [1]}}', "'w' wrongly"),
        ('{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "'w' 4 bytes"),
        ('{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}', "'w'"),
        ('{"w": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}', "'w' as F4"),
    ],
)
def test_corrupt_header_is_named(tmp_path: Path, header: str, message: str):
    raw = header.encode()
    (make_folder(tmp_path) / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" * 4)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_missing_shard_is_named(sharded: Path):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors"):
        open_checkpoint(sharded)


def test_index_pointing_to_a_tensor_its_shard_lacks_is_named(sharded: Path):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'ghost\.weight'"):
        open_checkpoint(sharded)


def test_paths_that_are_no_checkpoint_say_so(single: Path):
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        open_checkpoint(single / "nowhere")
    with pytest.raises(CheckpointError, match="expected the folder"):
        open_checkpoint(single / "model.safetensors")
