"""The fault matrix: who fails, how, in which phase of a save, and what must be so afterwards. Data only."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import product

__all__ = ["CELLS", "SECONDS_WITHOUT_BYTES", "Actor", "Cell", "Expected", "Fault", "Phase"]

SECONDS_WITHOUT_BYTES = 5
"""Deadline of a save in these jobs; a rank that does not come to vote ends its peers after three times that."""


class Actor(StrEnum):
    """Who fails."""

    TRAINER = "trainer rank"
    WRITER = "writer"


class Fault(StrEnum):
    """What happens to it."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    EXCEPTION = "exception"
    FULL = "ENOSPC"
    READ_ONLY = "read-only"


class Phase(StrEnum):
    """Where in a save, in order."""

    PLANNING = "planning"
    STAGING = "staging"
    WRITING = "mid-write"
    VOTE = "before commit"
    RENAME = "commit to rename"
    TRACKER = "rename to tracker"


FILE_SYSTEM = (Fault.FULL, Fault.READ_ONLY)
SIGNALS = (Fault.KILL, Fault.STOP)
_WRITER_WORKS = (Phase.STAGING, Phase.WRITING, Phase.VOTE)
"""Before commit it makes durable what will be published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What must be so after a fault."""

    job_ends: bool = False
    """Whether the job ends, with a code that is not zero on every rank that was not killed."""
    error: str | None = None
    """In the error that every rank raises; ``None``: the save succeeds."""
    newest: int = 1
    """Step of the newest complete checkpoint; the fault is in the save of step 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One fault."""

    actor: Actor
    fault: Fault
    phase: Phase

    def __str__(self) -> str:
        return f"{self.actor}, {self.fault}, {self.phase}"

    @property
    def rank(self) -> int:
        """Whose it is: the coordinator where publishing fails, else the other rank."""
        return 0 if self.phase in (Phase.VOTE, Phase.RENAME, Phase.TRACKER) else 1

    @property
    def not_applicable(self) -> str | None:
        """Why there is no such fault."""
        if self.actor is Actor.WRITER and self.fault not in SIGNALS and self.phase not in _WRITER_WORKS:
            return "the writer runs nothing of the save then"
        return None

    @property
    def expected(self) -> Expected:
        """What must be so afterwards."""
        newest = 2 if self.phase is Phase.TRACKER else 1
        if self.actor is Actor.TRAINER:
            if self.fault in SIGNALS or (self.fault is Fault.EXCEPTION and self.phase is Phase.WRITING):
                return Expected(job_ends=True, newest=newest)
            if self.fault is Fault.FULL and self.phase in (Phase.VOTE, Phase.RENAME):
                # All to publish is on disk by then, and a rename needs no room; the tracker does.
                return Expected(error=_cause(self), newest=2)
            return Expected(error=_cause(self), newest=newest)
        if self.fault in SIGNALS and self.phase not in _WRITER_WORKS:
            stopped = self.fault is Fault.STOP and self.phase is Phase.PLANNING
            return Expected(error="moved no byte") if stopped else Expected(newest=2)
        return Expected(error=_cause(self))


def _cause(cell: Cell) -> str:
    return {
        Fault.KILL: "the writer process ended with exit code -9",
        Fault.STOP: f"the writer process moved no byte for {SECONDS_WITHOUT_BYTES} s",
        Fault.EXCEPTION: "injected",
        Fault.FULL: "No space left on device",
        Fault.READ_ONLY: "Read-only file system",
    }[cell.fault]


CELLS = tuple(Cell(actor=actor, fault=fault, phase=phase) for actor, fault, phase in product(Actor, Fault, Phase))
