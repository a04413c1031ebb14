"""Shows on stderr what the user is waiting for."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class StderrProgress:
    """One line per activity: a live bar in a terminal, a plain line once elsewhere."""

    def __init__(self):
        self._console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._label: str | None = None
        self._task: TaskID | None = None
        self._is_muted = False

    def __call__(self, label: str, done: int, total: int) -> None:
        """Report progress; a total of 0 means that it is unknown."""
        if self._is_muted:
            return
        is_new = label != self._label
        self._label = label
        if not self._console.is_terminal:
            if is_new:
                print(f"{label} ...", file=sys.stderr, flush=True)
            return
        self._bar.start()
        if is_new:
            self._clear()
            self._task = self._bar.add_task(label, total=total or None)
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total or None)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.pause()
        print(text, file=sys.stderr, flush=True)

    def mute(self) -> None:
        """Say nothing more: the text on stdout speaks now, and a report would land in its middle."""
        self.pause()
        self._is_muted = True

    def pause(self) -> None:
        """Take the bar away, before other output."""
        if self._console.is_terminal:
            self._clear()
            self._bar.stop()
        self._label = None

    def _clear(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    def __enter__(self) -> "StderrProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()
