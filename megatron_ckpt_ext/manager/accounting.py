"""Where the time of a manager's saves goes, as events."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.commit.commit import Committed, How
from megatron_ckpt_ext.events import EventLog, Phase

__all__ = ["Accounting", "Save"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One save of a manager."""

    step: int
    """Its step."""
    path: str
    """Directory of the checkpoint."""
    started: float = field(default_factory=time.monotonic)
    """When ``save`` was called."""


class Accounting:
    """Records each phase of each save. Safe to use from several threads. Owns the log; no collectives.

    The phases: ``stage`` the trainer's time in ``save``, ``fence`` its time in ``wait_for_staging``, ``write`` from the
    start of the write to its vote, ``publish`` from the call of ``save`` until the checkpoint is durable, ``retain``
    the removal of older ones; ``rebuild`` where the layout did not match, and ``fallback`` where a save is not what
    was asked for, with the reason.
    """

    def __init__(self, log: EventLog, *, counting: bool) -> None:
        """Keep the log, and close it with this.

        Args:
            log: of this rank.
            counting: whether the events have the collectives, which costs each of them some microseconds.
        """
        self._log = log
        self._counter = CollectiveCounter()
        self._counts: dict[tuple[int, Phase], Counter[str]] = {}
        self._lock = Lock()
        if counting:
            self._counter.start()

    @contextmanager
    def counting(self, save: Save, phase: Phase) -> Iterator[None]:
        """Count the collectives of this thread inside towards the phase of a save that is recorded next."""
        with self._counter.phase(phase) as tally:
            try:
                yield
            finally:
                with self._lock:
                    self._counts.setdefault((save.step, phase), Counter()).update(tally.counts)

    def staged(self, save: Save, *, items: int, bytes: int) -> None:
        """``save`` returns now."""
        self._record(Phase.STAGE, save, since=save.started, items=items, bytes=bytes)

    def fenced(self, save: Save, since: float) -> None:
        """The trainer may change its tensors again, and has waited for that since ``since``."""
        self._record(Phase.FENCE, save, since=since)

    def written(self, save: Save, since: float) -> None:
        """Everything is written, and all ranks know it."""
        self._record(Phase.WRITE, save, since=since)

    def fell_back(self, save: Save, reason: str) -> None:
        """This save is not what was asked for; the collectives of ``save`` are those of all of it."""
        self._record(Phase.FALLBACK, save, since=time.monotonic(), reason=reason, counted=Phase.STAGE)

    def durable(self, save: Save, committed: Committed) -> None:
        """The checkpoint is published."""
        if committed.how is How.REBUILT:
            self._record(Phase.REBUILD, save, since=time.monotonic(), reason=committed.reason)
        self._record(Phase.PUBLISH, save, since=save.started)

    def retained(self, save: Save, since: float, *, removed: int, reason: str | None) -> None:
        """Older checkpoints are removed, or not, for a reason."""
        self._record(Phase.RETAIN, save, since=since, items=removed, reason=reason)

    def close(self) -> None:
        """Stop counting and close the log."""
        self._counter.close()
        self._log.close()

    def _record(
        self,
        phase: Phase,
        save: Save,
        *,
        since: float,
        items: int = 0,
        bytes: int = 0,
        reason: str | None = None,
        counted: Phase | None = None,
    ) -> None:
        with self._lock:
            collectives = self._counts.pop((save.step, counted or phase), Counter())
        self._log.record(
            phase,
            step=save.step,
            seconds=time.monotonic() - since,
            items=items,
            bytes=bytes,
            collectives=collectives,
            reason=reason,
            path=save.path,
        )
