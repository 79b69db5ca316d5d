"""Counting collectives, so that "no gathers" is a number in every job and not a promise.

Owns the counts and their phases. How a call is seen at all is in ``compat/c10d.py``. Importing this needs no torch.

Seen: every call on a process group from Python, whatever name it was imported under, on any thread of this
process; from torch 2.14 on also what C++ issues (functional collectives, DTensor, DDP's reducer) on groups that
existed when the counter started or a phase last began. Not seen: before 2.14, what C++ issues; calls on a group's
backend object; groups of other libraries that override the methods of ``ProcessGroup``; other processes; stores.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from megatron_ckpt_ext.compat.c10d import OBJECT_COLLECTIVES, Call, Tap

__all__ = ["NO_PHASE", "CollectiveCounter", "CollectiveSums", "PhaseTally", "is_object_collective"]

NO_PHASE: Final = "other"
"""Where calls of a thread outside any phase are counted."""


def is_object_collective(name: str) -> bool:
    """Whether ``name`` pickles what it moves, as ``gather_object`` does."""
    return name in OBJECT_COLLECTIVES


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveSums:
    """How many object collectives and how many others; each object collective counts once."""

    objects: int
    others: int

    @classmethod
    def of(cls, *counts: Mapping[str, int]) -> Self:
        """Sum counts by name, as a tally or an event holds them."""
        objects = sum(n for each in counts for name, n in each.items() if is_object_collective(name))
        return cls(objects=objects, others=sum(sum(each.values()) for each in counts) - objects)


class PhaseTally:
    """What was counted in one phase so far. Every property is a copy; safe to read on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._primitives: Counter[str] = Counter()

    @property
    def counts(self) -> dict[str, int]:
        """Calls by their name in torch.distributed: an object collective once, and not what it is made of."""
        with self._lock:
            return dict(self._counts)

    @property
    def objects(self) -> dict[str, int]:
        """The object collectives among `counts`."""
        return {name: n for name, n in self.counts.items() if is_object_collective(name)}

    @property
    def primitives(self) -> dict[str, int]:
        """Calls on process groups by name, those that object collectives are made of included."""
        with self._lock:
            return dict(self._primitives)

    def add(self, call: Call) -> None:
        """Count one call."""
        with self._lock:
            self._primitives[call.name] += 1
            if call.owner is None:
                self._counts[call.name] += 1
            elif call.opens:
                self._counts[call.owner] += 1


class _Phases(threading.local):
    """The phases the current thread is in, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, PhaseTally]] = []


class CollectiveCounter:
    """Counts the collectives of this process by phase, from `start` to `close`.

    Before `start` torch is untouched and phases are empty, so callers need not ask whether counting is on.
    Several counters can count at once, each for itself. No collectives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phases = _Phases()
        self._totals: dict[str, PhaseTally] = {}
        self._tap: Tap | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Count from now on. Starting again changes nothing; after `close` it goes on with the same totals."""
        if self._tap is None:
            self._tap = Tap.attach(self._count)

    def close(self) -> None:
        """Stop counting; torch is as it was once no counter is left. Totals stay readable. Safe to call twice."""
        tap, self._tap = self._tap, None
        if tap is not None:
            tap.detach(self._count)

    @contextmanager
    def phase(self, name: str) -> Iterator[PhaseTally]:
        """Count what this thread issues inside as ``name``; of nested phases the innermost counts.

        The tally has this run of the phase, `totals` all of them.
        """
        if self._tap is not None:
            self._tap.follow_groups()
        tally = PhaseTally()
        self._phases.entered.append((name, tally))
        try:
            yield tally
        finally:
            self._phases.entered.pop()

    def totals(self) -> dict[str, dict[str, int]]:
        """`PhaseTally.counts` by phase, over all threads; `NO_PHASE` has what no phase had."""
        return {phase: tally.counts for phase, tally in self._by_phase().items()}

    def primitives(self) -> dict[str, dict[str, int]]:
        """`PhaseTally.primitives` by phase, over all threads."""
        return {phase: tally.primitives for phase, tally in self._by_phase().items()}

    def _by_phase(self) -> dict[str, PhaseTally]:
        with self._lock:
            return dict(self._totals)

    def _count(self, call: Call) -> None:
        phase, tally = self._phases.entered[-1] if self._phases.entered else (NO_PHASE, None)
        with self._lock:
            total = self._totals.setdefault(phase, PhaseTally())
        total.add(call)
        if tally is not None:
            tally.add(call)
