"""The events file: what a save did, one JSON object a line, one file per rank.

Owns the record format and both of its ends. It decides nothing: reasons and counts come from the stages.
"""

import errno
import glob
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

from megatron_ckpt_ext.errors import ConfigurationError

__all__ = ["Event", "EventLog", "Phase", "read_events"]

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    """The phases of a save that leave a record."""

    PLAN = "plan"
    STAGE = "stage"
    FENCE = "fence"
    WRITE = "write"
    COMMIT = "commit"
    PUBLISH = "publish"
    REBUILD = "rebuild"
    FALLBACK = "fallback"
    RETAIN = "retain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of an events file; the fields are the keys of the JSON object, in this order."""

    time: float
    """When the phase ended: seconds since the epoch, by the rank's own clock."""
    step: int
    rank: int
    phase: Phase
    seconds: float
    bytes: int
    items: int
    collectives: Mapping[str, int]
    """Calls by name; see `megatron_ckpt_ext.collectives` for the names."""
    reason: str | None
    """Why, for a rebuild, a fallback or a failure."""
    path: str | None

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read one line; keys that a later version added are ignored.

        Raises:
            ValueError: the line is not a complete event.
        """
        record = json.loads(line)
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if not isinstance(record, dict) or name not in record]
        if missing:
            raise ValueError(f"not an event: {', '.join(missing)} missing in {line.strip()!r}")
        values: dict[str, Any] = {name: record[name] for name in names}
        return cls(**values | {"phase": Phase(values["phase"])})

    def to_json(self) -> str:
        """The event as one line, with its line end."""
        return json.dumps(asdict(self)) + "\n"


class EventLog:
    """Appends this rank's events to `FILE.<rank>`; with `path=None` it records nothing.

    Safe to use from several threads. Evidence never costs a checkpoint: when a record cannot be written the log
    warns once and goes on. No collectives.

    Raises:
        ConfigurationError: the file cannot be opened.
    """

    def __init__(self, path: str | None, rank: int, clock: Callable[[], float] = time.time) -> None:
        self._rank = rank
        self._clock = clock
        self._lock = Lock()
        self._warned = False
        self._file = None if path is None else _open(path, rank)
        # A killed job may have left half a line: the first record of this one starts on a line of its own.
        self._torn = self._file is not None and _ends_inside_a_line(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def record(
        self,
        phase: Phase,
        *,
        step: int,
        seconds: float = 0.0,
        bytes: int = 0,
        items: int = 0,
        collectives: Mapping[str, int] | None = None,
        reason: str | None = None,
        path: str | None = None,
    ) -> None:
        """Append one event that ends now. `seconds` is its duration, `path` the checkpoint it is about."""
        event = Event(
            time=self._clock(),
            step=step,
            rank=self._rank,
            phase=phase,
            seconds=seconds,
            bytes=bytes,
            items=items,
            collectives=dict(collectives or {}),
            reason=reason,
            path=path,
        )
        with self._lock:
            self._append(event.to_json())

    def close(self) -> None:
        """Close the file; later records are dropped. Safe to call twice."""
        with self._lock:
            descriptor, self._file = self._file, None
            if descriptor is not None:
                os.close(descriptor)

    def _append(self, line: str) -> None:
        if self._file is None:
            return
        data = (b"\n" if self._torn else b"") + line.encode()
        try:
            self._torn = os.write(self._file, data) < len(data)
            if self._torn:
                raise OSError(errno.ENOSPC, "only a part of a line was written")
        except OSError as error:
            if not self._warned:
                logger.warning("Rank %d: events cannot be written any more, saves go on: %s", self._rank, error)
            self._warned = True


def read_events(path: str) -> list[Event]:
    """Read what `--ckpt-events FILE` left: every rank's file if given FILE, or one rank's file. No collectives.

    Events come in file order, rank after rank. A line that is no event is skipped with a warning; a torn last
    line, as a running or killed job leaves it, without one.

    Raises:
        FileNotFoundError: no rank has written such a file.
    """
    return [event for file in _files(Path(path)) for event in _events(file)]


def _open(path: str, rank: int) -> int:
    file = f"{path}.{rank}"
    try:
        return os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigurationError(
            f"--ckpt-events {path}: cannot append to {file} ({error.strerror}); "
            "name a file in an existing directory that the job may write to"
        ) from error


def _ends_inside_a_line(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = [file for file in path.parent.glob(f"{glob.escape(path.name)}.*") if file.suffix[1:].isdecimal()]
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no events file, nor one with a rank behind its name", str(path))
    return sorted(found, key=lambda file: int(file.suffix[1:]))


def _events(file: Path) -> Iterator[Event]:
    for number, line in enumerate(file.read_text(errors="replace").splitlines(keepends=True), start=1):
        try:
            yield Event.from_json(line)
        except ValueError as error:
            if line.strip() and line.endswith("\n"):
                logger.warning("%s:%d is skipped: %s", file, number, error)
