"""Processes of a job, found by the environment that they were started with, on this machine."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Self

__all__ = ["MARK", "KillerOfRanks", "processes_of", "remaining_processes"]

MARK = "FUNCTIONAL_JOB"
"""Every process of a job has its folder in this variable."""
RANK = b"LOCAL_RANK="
POLL = 0.001


def processes_of(folder: Path, *, ranks_only: bool = False) -> list[int]:
    """Return the processes of the job whose folder this is; only its ranks and what they started, where asked for."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if mark in variables and (not ranks_only or any(each.startswith(RANK) for each in variables)):
                found.append(int(process.name))
    return found


def remaining_processes(folder: Path, *, within: float = 10.0) -> list[int]:
    """Return the processes of a job that has ended which are still there after this many seconds."""
    deadline = time.monotonic() + within
    while (found := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


class KillerOfRanks:
    """Kills every rank of a job, and what they started, as soon as a condition holds. A context manager.

    Args:
        folder: of the job.
        condition: asked a thousand times a second.
    """

    def __init__(self, folder: Path, condition: Callable[[], bool]) -> None:
        self._folder = folder
        self._condition = condition
        self._over = Event()
        self._thread = Thread(target=self._watch, name="killer of ranks")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(POLL):
            if self._condition():
                for process in processes_of(self._folder, ranks_only=True):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                return
