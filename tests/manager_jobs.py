"""What the tests of ``CheckpointManager`` share: values that hold a write back or break it, and a job that takes notes.

Functions named ``*_on_rank`` run there. What a value does when it is pickled happens in the thread that writes, for
its copy in host memory is the value itself.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from dtensor_jobs import StateDict, Trainer, full, spoiled
from ranks import RankPool
from workload import heard

from megatron_ckpt_ext import CheckpointManager, SaveFailedError, verify_checkpoint
from megatron_ckpt_ext.collectives import NO_PHASE, CollectiveCounter, CollectiveSums
from megatron_ckpt_ext.events import Event, read_events

SAVE = "save"
SECONDS = 30.0
"""How long anything here is waited for."""


class Uncopied:
    """A value whose deep copy is the value itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Gate(Uncopied):
    """Holds a write back until ``path`` exists; a checkpoint has its name in its place."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        until(self.path.exists)
        return (str, (self.path.name,))

    def open(self) -> None:
        """Called on all ranks, once all have seen what they wanted to see."""
        if dist.is_initialized():
            dist.barrier()
        self.path.touch()


class Unwritable(Uncopied):
    """Fails to be written."""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        raise OSError("the disk is full")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what was waited for did not come")
        time.sleep(0.005)


def without_gates(values: StateDict) -> StateDict:
    return {key: value for key, value in values.items() if not key.startswith("gate.")}


def only_on(rank: int, value: Any) -> StateDict:
    """An entry that each rank writes itself; on ``rank`` it is ``value``."""
    own = dist.get_rank()
    return {f"own.{own}": value if own == rank else ""}


def is_complete(directory: str | Path, step: int) -> bool:
    return verify_checkpoint(Path(directory, f"step_{step}")).complete


def is_published(directory: str | Path, step: int) -> bool:
    return Path(directory, f"step_{step}", ".metadata").exists()


def steps_in(directory: Path) -> list[str]:
    """Names of the directories there, links to some included, that begin as those of steps do."""
    return sorted(path.name for path in directory.glob("step_*") if path.is_dir())


def failure(attempt: Callable[[], object]) -> str | None:
    """What a failed save says; ``None`` if nothing failed."""
    try:
        attempt()
    except SaveFailedError as error:
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def changed(state: StateDict) -> Iterator[None]:
    """Train on: every tensor is changed in place, and so is what is not a tensor."""
    rates = list(state["scheduler"]["lr"])
    state["scheduler"]["lr"][:] = [-1.0]
    with spoiled(state):
        yield
    state["scheduler"]["lr"][:] = rates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noted:
    """What one rank saw of one save."""

    values: StateDict
    """What was in the state dict, whole, as a synchronous copy made before the save has it."""
    counts: dict[str, int]
    """Collectives of ``save`` on the trainer's thread."""
    background: dict[str, int]
    """All others until the save had ended."""
    published_by_save: bool
    """Whether ``.metadata`` was there when ``save`` returned."""
    seconds: float
    """From the call of ``save`` until it was waited for."""

    @property
    def objects(self) -> int:
        """Object collectives of the save on all threads."""
        return CollectiveSums.of(self.counts, self.background).objects


@dataclasses.dataclass(frozen=True, kw_only=True)
class Life:
    """What one rank saw of one job."""

    saves: dict[int, Noted]
    hooks: list[tuple[int, bool]]
    """Steps that ``on_saved`` was called with, and whether each was complete then."""
    events: dict[int, list[Event]]
    """By step."""
    warnings: list[str]
    loaded: tuple[int | None, StateDict]
    """The step that the job has resumed from, and what was in it."""


class Job:
    """A trainer and its manager. ``close`` ends it. Called on all ranks."""

    def __init__(self, directory: str, *, seed: int = 1, **settings: Any) -> None:
        self.directory = directory
        self.trainer = Trainer(seed)
        self.hooks: list[tuple[int, bool]] = []
        self.manager = CheckpointManager(directory, on_saved=self._saved, progress=False, **settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.manager.close()

    def gate(self, name: str) -> Gate:
        """A gate that holds back what a thread writes; others pickle a value in ``save``, so for them it is open."""
        gate, config = Gate(Path(self.directory, name)), self.manager.config
        if not config.async_save or config.writer == "process":
            gate.open()
        return gate

    def state(self, gate: Gate | None = None, **more: Any) -> StateDict:
        """State of the trainer; the gate is an entry of each rank, written before its tensors."""
        return self.trainer.state(**{f"gate.{dist.get_rank()}": gate or ""}, **more)

    def whole(self, gate: Gate, **more: Any) -> StateDict:
        """What a checkpoint of ``state`` must hold, as a synchronous copy. Gathers every tensor."""
        gates = {f"gate.{rank}": gate.path.name for rank in range(dist.get_world_size())}
        return {**full(self.trainer.state(**more)), **gates}

    def noted(self, step: int, **more: Any) -> Noted:
        """Train, save, and change everything; then the gate opens, and the save is waited for."""
        gate = self.gate(f"gate_{step}")
        self.trainer.step()
        values = self.whole(gate, **more)
        state = self.state(gate, **more)
        began = time.monotonic()
        with CollectiveCounter() as counter:
            with counter.phase(SAVE):
                self.manager.save(step, state)
            self.manager.wait_for_staging()
            with changed(state):
                published = is_published(self.directory, step)
                with counter.phase("gate"):
                    gate.open()
                self.manager.wait()
            counts = counter.totals()
        counts.pop("gate", None)
        return Noted(
            values=values,
            counts=counts.pop(SAVE, {}),
            background=counts.pop(NO_PHASE, {}),
            published_by_save=published,
            seconds=time.monotonic() - began,
        )

    def _saved(self, step: int) -> None:
        self.hooks.append((step, is_complete(self.directory, step)))


def life_on_rank(directory: str, seed: int, steps: list[int], settings: StateDict) -> Life:
    """A job that resumes, if there is something to resume from, and saves ``steps``."""
    events = f"{directory}/events_{seed}"
    with heard() as warnings, Job(directory, seed=seed, events=events, **settings) as job:
        state = job.trainer.state()
        loaded = job.manager.load(state), full(state)
        saves = {step: job.noted(step) for step in steps}
    own = read_events(f"{events}.{dist.get_rank()}")
    by_step = {step: [event for event in own if event.step == step] for step in steps}
    return Life(saves=saves, hooks=job.hooks, events=by_step, warnings=warnings, loaded=loaded)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoLives:
    """A job of three saves that makes its prepared metadata, and one that resumes and saves twice more."""

    directory: Path
    first: list[Life]
    """By rank."""
    second: list[Life]

    def of_rank(self, rank: int) -> dict[int, Noted]:
        return {**self.first[rank].saves, **self.second[rank].saves}


def two_lives(ranks: RankPool, directory: Path, **settings: Any) -> TwoLives:
    file = str(directory / "prepared.metadata")
    create = {"ckpt_metadata": file, "ckpt_metadata_create": True, **settings}
    first = ranks.run(life_on_rank, str(directory), 1, [1, 2, 3], create)
    second = ranks.run(life_on_rank, str(directory), 2, [4, 5], {"ckpt_metadata": file, **settings})
    return TwoLives(directory=directory, first=first, second=second)


def plain(number: float) -> StateDict:
    """The state dict of a job without a process group."""
    return {"weight": torch.full((5, 3), number), "step": torch.tensor(number), "note": f"number {number}"}
