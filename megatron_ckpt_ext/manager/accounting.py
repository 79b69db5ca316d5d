"""Where the time of a manager's saves goes, as events."""

import time
from dataclasses import dataclass, field

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

    def __init__(self, log: EventLog) -> None:
        """Keep the log, and close it with this."""
        self._log = log

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
        """This save is not what was asked for."""
        self._record(Phase.FALLBACK, save, since=time.monotonic(), reason=reason)

    def durable(self, save: Save, committed: Committed) -> None:
        """The checkpoint is published."""
        if committed.how is How.REBUILT:
            self._record(Phase.REBUILD, save, since=time.monotonic(), reason=committed.reason)
        self._record(Phase.PUBLISH, save, since=save.started)

    def retained(self, save: Save, since: float, *, removed: int, reason: str | None) -> None:
        """Older checkpoints are removed, or not, for a reason."""
        self._record(Phase.RETAIN, save, since=since, items=removed, reason=reason)

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def _record(
        self, phase: Phase, save: Save, *, since: float, items: int = 0, bytes: int = 0, reason: str | None = None
    ) -> None:
        seconds = time.monotonic() - since
        self._log.record(
            phase, step=save.step, seconds=seconds, items=items, bytes=bytes, reason=reason, path=save.path
        )
