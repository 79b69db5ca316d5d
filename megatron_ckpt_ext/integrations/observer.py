"""Writing events about the saves of ``megatron.training``, ours and stock alike; it changes nothing in them."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.events import EventLog, Phase

__all__ = ["Measured", "SaveObserver"]


@dataclass(slots=True)
class Measured:
    """Time and collectives of one phase of one save, possibly in several pieces."""

    seconds: float = 0.0
    collectives: Counter[str] = field(default_factory=Counter)


class SaveObserver:
    """Measures the phases of each save on the training thread and records them. Owns the log and the counter.

    The phases: ``plan`` from the call of ``save_checkpoint`` to its end, staging apart; ``stage`` the hand-over to the
    writer; ``commit`` every poll of a save in flight and its finalizers. What Megatron does in them on its own account
    is counted too. No collectives.
    """

    def __init__(self, path: str, rank: int, checkpoint_path: Callable[[int], str]) -> None:
        """Open the events file and start counting.

        Args:
            path: of ``--ckpt-events``.
            rank: this rank.
            checkpoint_path: step -> directory.

        Raises:
            ConfigurationError: the file cannot be opened.
        """
        self._log = EventLog(path, rank)
        self._checkpoint_path = checkpoint_path
        self._counter = CollectiveCounter()
        self._counter.start()
        self._in_flight: deque[int] = deque()
        self._saving: int | None = None
        self._stage = Measured()
        self._commit = Measured()

    def saving(
        self, step: int, save: Callable[[], Any], *, reason: str | None = None, fallback: str | None = None
    ) -> Any:
        """Run ``save_checkpoint`` for ``step`` and record ``plan``, and ``stage`` if it scheduled anything.

        Args:
            step: of the save.
            save: the call.
            reason: why it is planned together, for ``plan``.
            fallback: why it is synchronous, for a record ``fallback``.
        """
        self._stage = Measured()
        plan = Measured()
        self._saving = step
        try:
            with self._measure(Phase.PLAN, plan):
                result = save()
        finally:
            self._saving = None
        plan.seconds -= self._stage.seconds
        self._record(Phase.PLAN, step, plan, reason=reason)
        if fallback is not None:
            self._record(Phase.FALLBACK, step, Measured(), reason=fallback)
        if self._stage.seconds:
            self._in_flight.append(step)
            self._record(Phase.STAGE, step, self._stage)
        return result

    def scheduling(self, schedule: Callable[[], Any]) -> Any:
        """Run ``schedule_async_save``, inside ``saving``."""
        with self._measure(Phase.STAGE, self._stage):
            return schedule()

    def finalizing(
        self, finalize: Callable[[], Any], unfinalized: Callable[[], int], written: Callable[[], tuple[int, int]]
    ) -> Any:
        """Run ``maybe_finalize_async_save``; record ``commit`` for each save that ended in it.

        Args:
            finalize: the call.
            unfinalized: how many saves are still in flight.
            written: items that this rank wrote in the last save, and their bytes, where known.
        """
        if not self._in_flight:
            return finalize()
        try:
            with self._measure(Phase.COMMIT, self._commit):
                result = finalize()
        except BaseException as error:
            self._committed(reason=str(error))
            raise
        while len(self._in_flight) > unfinalized():
            items, size = written()
            self._committed(items=items, size=size)
        return result

    def _committed(self, *, items: int = 0, size: int = 0, reason: str | None = None) -> None:
        commit, self._commit = self._commit, Measured()
        self._record(Phase.COMMIT, self._in_flight.popleft(), commit, items=items, size=size, reason=reason)

    def rebuilt(self, reason: str) -> None:
        """Record that a save was rebuilt: that which is being finalized, or, inside ``saving``, a synchronous one."""
        step = self._in_flight[0] if self._saving is None else self._saving
        self._record(Phase.REBUILD, step, Measured(), reason=reason)

    def close(self) -> None:
        """Stop counting and close the file. Safe to call twice."""
        self._counter.close()
        self._log.close()

    @contextmanager
    def _measure(self, phase: Phase, measured: Measured) -> Iterator[None]:
        start = time.perf_counter()
        with self._counter.phase(phase) as tally:
            try:
                yield
            finally:
                measured.seconds += time.perf_counter() - start
        measured.collectives.update(tally.counts)

    def _record(
        self,
        phase: Phase,
        step: int,
        measured: Measured,
        *,
        items: int = 0,
        size: int = 0,
        reason: str | None = None,
    ) -> None:
        self._log.record(
            phase,
            step=step,
            seconds=measured.seconds,
            items=items,
            bytes=size,
            collectives=measured.collectives,
            reason=reason,
            path=self._checkpoint_path(step),
        )
