"""A progress display for long writes and loads: on a terminal, on one rank."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

__all__ = ["ProgressDisplay"]

logger = logging.getLogger(__name__)

_MIB = 1 << 20


class ProgressDisplay:
    """Shows what is being written or loaded while it lasts. No collectives."""

    def __init__(self, *, enabled: bool, console: Console | None = None) -> None:
        """Decide whether to show anything.

        Args:
            enabled: whether this rank shows it, if it has a terminal.
            console: where to; by default stderr.
        """
        self._console = console or Console(stderr=True)
        self._enabled = enabled and self._console.is_terminal

    @contextlib.contextmanager
    def writing(self, path: str, rank: int, total: int) -> Iterator[None]:
        """Show how much of ``total`` bytes the files of ``rank`` in ``path`` have so far."""
        with self._showing(f"writing {path}", _Written(path, rank, total)):
            yield

    @contextlib.contextmanager
    def loading(self, path: str) -> Iterator[None]:
        """Show that ``path`` is being loaded."""
        with self._showing(f"loading {path}"):
            yield

    @contextlib.contextmanager
    def _showing(self, text: str, *columns: ProgressColumn) -> Iterator[None]:
        shown = self._started(text, columns) if self._enabled else None
        try:
            yield
        finally:
            if shown is not None:
                self._harmlessly(shown.stop)

    def _started(self, text: str, columns: tuple[ProgressColumn, ...]) -> Progress | None:
        progress = Progress(
            *(SpinnerColumn(), TextColumn("{task.description}"), *columns, TimeElapsedColumn()),
            console=self._console,
            transient=True,
            refresh_per_second=4,
            redirect_stdout=False,  # what the trainer prints meanwhile is its own
            redirect_stderr=False,
        )
        progress.add_task(text, total=None)
        return progress if self._harmlessly(progress.start) else None

    def _harmlessly(self, draw: Callable[[], None]) -> bool:
        """Draw; a terminal that is gone, or an interpreter that starts no thread any more, decides about no save."""
        try:
            draw()
        except Exception as error:
            self._enabled = False
            logger.warning("There is no progress display any more: %s: %s", type(error).__name__, error)
            return False
        return True


class _Written(ProgressColumn):
    """Bytes of one rank's files, of all that it writes."""

    def __init__(self, path: str, rank: int, total: int) -> None:
        super().__init__()
        self._path = path
        self._prefix = f"__{rank}_"
        self._total = total

    def render(self, task: Task) -> Text:
        """Look at the files."""
        return Text(f"{self._bytes() / _MIB:.0f} of {self._total / _MIB:.0f} MiB")

    def _bytes(self) -> int:
        with contextlib.suppress(OSError):
            return sum(
                Path(each).stat().st_size for each in os.scandir(self._path) if each.name.startswith(self._prefix)
            )
        return 0
