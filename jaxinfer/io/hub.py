"""From a model's name to files on this machine, fetched once if need be."""

import difflib
import os
import re
from pathlib import Path

from jaxinfer.errors import ModelNotFoundError
from jaxinfer.io.demo_model import DEMO_MODEL, DEMO_REPOSITORY, fetch_demo_model
from jaxinfer.io.fetch import HubError, Progress, download_repository, first_line

__all__ = ["DEMO_MODEL", "cache_dir", "resolve_model"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NUM_SUGGESTIONS = 3


def cache_dir() -> Path:
    """Where jaxinfer keeps what it fetches and compiles: `JAXINFER_CACHE`, or `jaxinfer` in the user's cache folder."""
    own = os.environ.get("JAXINFER_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "jaxinfer"


def resolve_model(name_or_path: str | Path, *, progress: Progress | None = None) -> Path:
    """The model folder or GGUF file that a name or path stands for.

    Args:
        name_or_path: a Hugging Face folder, a GGUF file, a folder with one GGUF file, a built-in name, or a hub id.
        progress: called with (what is happening, bytes done, bytes in all or 0) during a download.

    Raises:
        ModelNotFoundError: there is no such model, or it can't be fetched.
    """
    name = str(name_or_path)
    try:
        path = Path(name_or_path).expanduser()
        if path.is_dir() and name:
            return _in_folder(path)
        if path.is_file():
            return _checked_file(path)
    except ModelNotFoundError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # too long, a null byte, "~nobody"
        raise ModelNotFoundError(f"{name!r} can't be a model's name or path: {first_line(error)}") from error
    if name.lower() == DEMO_MODEL:
        return fetch_demo_model(cache_dir(), progress=progress)
    if isinstance(name_or_path, str) and _HUB_ID.fullmatch(name) and not path.parent.is_dir():
        return _from_hub(name, progress)
    raise ModelNotFoundError(f"no model {name!r}: it is no folder, file or built-in name{_suggestion(name, path)}")


def _from_hub(repository: str, progress: Progress | None) -> Path:
    is_demo = repository.lower() == DEMO_REPOSITORY.lower()
    try:
        return download_repository(repository, progress=progress)
    except HubError:
        if not is_demo:
            raise
        return fetch_demo_model(cache_dir(), progress=progress, try_hub=False)


def _in_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelNotFoundError(f"{folder} holds {len(files)} GGUF files; name one, such as {files[0]}")
    raise ModelNotFoundError(f"{folder} is not a model folder: expected config.json or one .gguf file in it")


def _checked_file(path: Path) -> Path:
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise ModelNotFoundError(f"{path} is a file of a model; pass its folder, {path.parent}")
    return path


def _suggestion(name: str, path: Path) -> str:
    """What may have been meant: built-in names, and the neighbours of a path."""
    near = difflib.get_close_matches(name.lower(), [DEMO_MODEL], cutoff=0.4)
    if path.parent.is_dir() and path.name:
        try:
            neighbours = [entry.name for entry in path.parent.iterdir()]
        except OSError:
            neighbours = []
        near += [str(path.parent / entry) for entry in difflib.get_close_matches(path.name, neighbours, cutoff=0.6)]
    if near:
        return f"; did you mean {' or '.join(near[:_NUM_SUGGESTIONS])}?"
    return f"; pass a model folder, a .gguf file, a hub id such as {DEMO_REPOSITORY}, or {DEMO_MODEL}"
