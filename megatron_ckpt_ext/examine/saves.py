"""What events tell of each save: pure figures, from which a page or a table is made."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_ckpt_ext.collectives import CollectiveSums
from megatron_ckpt_ext.events import Event, Phase

__all__ = ["BLOCKING", "SaveFigures", "saves_of"]

BLOCKING = (Phase.PLAN, Phase.STAGE, Phase.FENCE, Phase.COMMIT)
"""Phases that the training thread spends in a save."""
_FIRST = (Phase.PLAN, Phase.STAGE)
_REASONS = (Phase.REBUILD, Phase.FALLBACK, Phase.RETAIN)
"""Phases whose reason says that something was not as asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveFigures:
    """One save of a job, over all ranks."""

    step: int
    """Step that was saved."""
    attempt: int
    """0, and more for a step that a resumed job saved again."""
    began: float
    """Seconds since the epoch of its first phase, on the lowest rank, by its clock."""
    ended: float
    """Seconds since the epoch of its last event, by the clock of the rank that wrote it."""
    ranks: int
    """Ranks that left events of it."""
    phases: Mapping[str, Mapping[int, float]]
    """Phase -> rank -> seconds."""
    blocking: Mapping[int, float]
    """Rank -> seconds that its training thread spent in the save."""
    bytes: int
    """Bytes of all ranks."""
    objects: int
    """Object collectives of the rank that took part in most."""
    others: int
    """Other collectives of the rank that took part in most."""
    remarks: tuple[str, ...]
    """Why it was rebuilt, or fell back; each once."""
    step_seconds: float | None
    """Seconds of a training step since the save before, saves left out; ``None`` for the first of a job."""

    @property
    def slowest(self) -> float:
        """Seconds that the training thread of the slowest rank spent in the save."""
        return max(self.blocking.values(), default=0.0)


def saves_of(events: Iterable[Event]) -> list[SaveFigures]:
    """Gather events by save, in the order in which they ended. Pure; no collectives.

    A step whose planning or staging a rank reports once more is another attempt: a job was resumed.
    """
    gathered: dict[tuple[int, int], list[Event]] = defaultdict(list)
    begun: Counter[tuple[int, int, Phase]] = Counter()
    for event in sorted(events, key=lambda each: each.time):
        if event.phase in _FIRST:
            begun[event.rank, event.step, event.phase] += 1
        attempt = max(begun[event.rank, event.step, phase] for phase in _FIRST)
        gathered[event.step, max(0, attempt - 1)].append(event)
    found = [_figures(step, attempt, of_save) for (step, attempt), of_save in gathered.items()]
    found.sort(key=lambda save: save.ended)
    return [
        replace(save, step_seconds=_step_seconds(before, save))
        for before, save in zip([None, *found], found, strict=False)
    ]


def _figures(step: int, attempt: int, events: list[Event]) -> SaveFigures:
    phases: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    blocking: dict[int, float] = defaultdict(float)
    bytes_of: dict[int, int] = defaultdict(int)
    for event in events:
        phases[event.phase.value][event.rank] += event.seconds
        blocking[event.rank] += event.seconds if event.phase in BLOCKING else 0.0
        bytes_of[event.rank] = max(bytes_of[event.rank], event.bytes)
    sums = [CollectiveSums.of(*(each.collectives for each in events if each.rank == rank)) for rank in blocking]
    first = min(blocking)
    return SaveFigures(
        step=step,
        attempt=attempt,
        began=min(event.time - event.seconds for event in events if event.rank == first),
        ended=events[-1].time,
        ranks=len(blocking),
        phases={phase: dict(of_phase) for phase, of_phase in phases.items()},
        blocking=dict(blocking),
        bytes=sum(bytes_of.values()),
        objects=max(each.objects for each in sums),
        others=max(each.others for each in sums),
        remarks=tuple(dict.fromkeys(each.reason for each in events if each.phase in _REASONS and each.reason)),
        step_seconds=None,
    )


def _step_seconds(before: SaveFigures | None, save: SaveFigures) -> float | None:
    """From the begin of one save to that of the next, without what the first kept its rank."""
    if before is None or save.attempt != before.attempt or save.step <= before.step:
        return None
    rank = min(before.blocking)
    return max(0.0, save.began - before.began - before.blocking[rank]) / (save.step - before.step)
