"""Downloads from the Hugging Face hub, quick to fail where there is no network."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxinfer.errors import ModelNotFoundError

Progress = Callable[[str, int, int], None]  # what is happening, done, total

_PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
_HUB_SECONDS = 4.0  # to answer at all; without a network, name resolution alone can take longer
_POLL_SECONDS = 0.2


class HubError(ModelNotFoundError):
    """The hub has no such model, or can't be reached.

    Attributes:
        reason: in a few words.
    """

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


def download_repository(repository: str, *, folder: Path | None = None, progress: Progress | None = None) -> Path:
    """The weights, configuration and tokenizer of a hub repository.

    Args:
        repository: such as "org/name".
        folder: where to put the files; None is the hub's own cache, which is used without a network too.
        progress: called with (what is happening, bytes done, bytes in all).

    Returns:
        The folder.

    Raises:
        HubError: there is no such repository, or the hub can't be reached and nothing is cached.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.file_download import repo_folder_name
    from tqdm.auto import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs | {"disable": True})

    options = {"allow_patterns": list(_PATTERNS), "ignore_patterns": ["*/*"], "tqdm_class": Silent}
    try:
        total = _num_bytes_on_hub(repository)
    except HubError as unreachable:
        if folder is not None:
            raise
        try:
            return Path(snapshot_download(repository, local_files_only=True, **options))
        except Exception:  # nothing usable is cached: the reason that counts is the first
            raise unreachable from None
    cached = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    label = f"Downloading {repository} from the Hugging Face hub"
    try:
        with watch_folder(folder or cached, label, total, progress):
            return Path(snapshot_download(repository, local_dir=folder, **options))
    except Exception as error:  # network, disk and hub errors have no common type
        raise HubError(
            f"{repository} could not be downloaded from the Hugging Face hub: {first_line(error)}", "download failed"
        ) from error


def first_line(error: BaseException) -> str:
    """What an error says, without its tail."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class watch_folder:
    """Report the growth of a folder while the body runs.

    Args:
        folder: grows, once it exists.
        label: what is happening.
        total: bytes expected.
        progress: is called from another thread, or None.
    """

    def __init__(self, folder: Path, label: str, total: int, progress: Progress | None):
        self._folder, self._label, self._total, self._progress = folder, label, total, progress
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        if self._progress:
            self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        if self._progress:
            self._is_done.set()
            self._thread.join()

    def _watch(self) -> None:
        assert self._progress
        while True:
            done = folder_bytes(self._folder)
            self._progress(self._label, min(done, self._total) if self._total else done, self._total)
            if self._is_done.wait(_POLL_SECONDS):
                return


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder, which may change meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.lstat().st_size if file.is_file() else 0
        except OSError:  # gone since it was listed
            continue
    return total


def _num_bytes_on_hub(repository: str) -> int:
    """Bytes to download, asked for with a deadline that covers name resolution too."""
    answer: list[Any] = []

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            answer.append(HfApi().model_info(repository, timeout=_HUB_SECONDS, files_metadata=True))
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS)
    if not answer:
        raise HubError(
            f"{repository} is not on this machine and the Hugging Face hub gave no answer in {_HUB_SECONDS:.0f} s; "
            "check the network or pass a local path",
            "no answer",
        )
    if isinstance(answer[0], Exception):
        raise _explain(repository, answer[0]) from answer[0]
    return sum(file.size or 0 for file in answer[0].siblings or () if _is_wanted(file.rfilename))


def _explain(repository: str, error: Exception) -> HubError:
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return HubError(f"{repository} is gated; accept its terms on the Hugging Face hub and set HF_TOKEN", "gated")
    if isinstance(error, RepositoryNotFoundError):
        return HubError(f"the Hugging Face hub has no public model {repository}; check the name", "not there")
    absent = f"{repository} is not on this machine"
    if isinstance(error, OfflineModeIsEnabled):
        return HubError(f"{absent} and HF_HUB_OFFLINE forbids to fetch it; pass a local path", "HF_HUB_OFFLINE is set")
    return HubError(
        f"{absent} and the Hugging Face hub can't be reached ({first_line(error)}); check the network "
        "or pass a local path",
        "can't be reached",
    )


def _is_wanted(name: str) -> bool:
    return "/" not in name and any(Path(name).match(pattern) for pattern in _PATTERNS)
