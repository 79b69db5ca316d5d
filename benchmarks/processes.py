"""Running one measurement in a process of its own, and reading what Linux counts about a process."""

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Counted", "Counts", "in_child", "memory_of"]

KIB = 1024


def in_child[T](function: Callable[..., T], *arguments: Any, timeout: float = 900.0) -> T:
    """Call ``function`` in a fork of this process, which has imported everything and holds nothing large.

    Raises:
        BrokenProcessPool: it was killed, for instance because memory ran out.
        TimeoutError: it took longer than ``timeout`` seconds.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *arguments).result(timeout)


def memory_of(pid: int | str = "self") -> dict[str, int]:
    """Return bytes: resident now and at most so far; private to the process; its proportional share."""
    status = _fields(f"/proc/{pid}/status")
    maps = _fields(f"/proc/{pid}/smaps_rollup")
    return {
        "rss": status["VmRSS"],
        "peak": status["VmHWM"],
        "uss": maps["Private_Clean"] + maps["Private_Dirty"],
        "pss": maps["Pss"],
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What happened in this process during one call."""

    opens: int
    """Files opened."""
    bytes_read: int
    """By system calls, from the page cache or not."""
    grown: int
    """Growth of the resident memory at its peak, in bytes; before the first call of a fresh process."""


class Counted:
    """Counts files opened and bytes read by this process, from its making on. For a process of one measurement."""

    def __init__(self) -> None:
        """Start; an audit hook cannot be removed again."""
        self._opens = 0
        sys.addaudithook(self._audit)
        self._before = memory_of()["rss"], 0
        cost = -_bytes_read() + _bytes_read()  # of looking
        self._before = self._before[0], _bytes_read() + cost
        self._opens = 0

    def counts(self) -> Counts:
        """Return what was counted so far."""
        opens, read = self._opens, _bytes_read()
        rss, read_before = self._before
        return Counts(opens=opens, bytes_read=read - read_before, grown=memory_of()["peak"] - rss)

    def _audit(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if event == "open":
            self._opens += 1


def _bytes_read() -> int:
    return _fields("/proc/self/io", unit=1)["rchar"]


def _fields(path: str, unit: int = KIB) -> dict[str, int]:
    fields = {}
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * unit
    return fields
