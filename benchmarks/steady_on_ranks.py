"""On real ranks: asynchronous saves of a resumed job, phase by phase, ours and stock's in turn.

Imported by the ranks only.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from asynchronous_jobs import AsynchronousJob, OurJob, StockJob
from sharded_state import SavedState
from sides import State

from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.compat.dcp import METADATA_FILE
from megatron_ckpt_ext.compat.nvrx import forget_what_the_writer_has
from megatron_ckpt_ext.emulation import CpuEmulation

__all__ = ["Kind", "SavedOnce", "save_on_rank"]

PREFIXES = {"stock": "stock.", "ours": "other."}
"""Of one length, so that files are equally long; different, since NVRx keeps what it sent by name, once a process."""
SAVES_UNTIL_STEADY = 2
"""Stock plans together in the first two saves of a job; from the third on it reuses its plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedOnce:
    """One save on one rank."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds of the training thread."""
    cpu: dict[str, float] = field(default_factory=dict)
    """The same while it computed; the rest is waiting."""
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)
    """Phase -> collectives by name."""

    @contextmanager
    def phase(self, name: str, counter: CollectiveCounter) -> Iterator[None]:
        """Measure one part of the save, or one more piece of a part."""
        with counter.phase(name) as tally:
            start, computed = time.perf_counter(), time.thread_time()
            yield
            self.cpu[name] = self.cpu.get(name, 0.0) + time.thread_time() - computed
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        counts = self.collectives.setdefault(name, {})
        for collective, number in tally.counts.items():
            counts[collective] = counts.get(collective, 0) + number


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Saves of a resumed job on one rank, by side."""

    first: dict[str, list[SavedOnce]]
    """The first of each job."""
    steady: dict[str, list[SavedOnce]]
    """From the third on."""


def save_on_rank(state: State, jobs: int, repetitions: int, workers: int, directory: str) -> Kind:
    """Run ``jobs`` resumed jobs of each side with ``repetitions`` steady saves each, save by save in turn.

    Called on all ranks. CUDA is emulated where stock asks for it, and not in the call of a steady save: the emulation
    looks at every tensor operation, which would be a third of that call on both sides.
    """
    forget_what_the_writer_has()  # this process may have run another job before
    with CollectiveCounter() as counter:
        sides: dict[str, AsynchronousJob] = {
            "stock": StockJob(directory, workers),
            "ours": OurJob(directory, workers),
        }
        states = {side: SavedState(state, prefix) for side, prefix in PREFIXES.items()}
        found = Kind(first={side: [] for side in sides}, steady={side: [] for side in sides})
        try:
            number = 0
            for job in range(-1, jobs):  # the first is not resumed: it makes the prepared file
                for saves in range(SAVES_UNTIL_STEADY + (repetitions if job >= 0 else 0)):
                    for side in sorted(sides, reverse=bool(number % 2)):
                        if saves == 0:
                            sides[side].resume()
                        folder = Path(directory, f"{side}_{number}")
                        saved = _save(
                            sides[side], states[side], number, folder, counter, emulated=saves < SAVES_UNTIL_STEADY
                        )
                        if job >= 0 and saves == 0:
                            found.first[side].append(saved)
                        elif job >= 0 and saves >= SAVES_UNTIL_STEADY:
                            found.steady[side].append(saved)
                    number += 1
        finally:
            with CpuEmulation(megatron=False):
                for each in sides.values():
                    each.close()
        dist.barrier()  # no rank ends long before another
        return found


def _save(
    side: AsynchronousJob, state: SavedState, step: int, folder: Path, counter: CollectiveCounter, *, emulated: bool
) -> SavedOnce:
    folder.mkdir(exist_ok=True)
    sharded = state.sharded(step)
    saved = SavedOnce()
    dist.barrier()
    with CpuEmulation(megatron=False) if emulated else nullcontext():
        with saved.phase("save call", counter):
            request = side.save(sharded, folder)
        with saved.phase("hand-over", counter):
            side.schedule(request)
    dist.barrier()
    with CpuEmulation(megatron=False):
        _finish(side, saved, folder, counter)
    dist.barrier()
    side.check(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        _remove_earlier(folder)
    return saved


def _finish(side: AsynchronousJob, saved: SavedOnce, folder: Path, counter: CollectiveCounter) -> None:
    """Poll once while the writers write, and again when all of them have ended."""
    with saved.phase("poll", counter):
        finished = side.poll()
    dist.barrier()
    if (folder / METADATA_FILE).exists():  # the writers were faster than the poll, which has published the save
        saved.seconds["finalize"] = saved.seconds.pop("poll")
        saved.cpu["finalize"] = saved.cpu.pop("poll")
        saved.collectives["finalize"] = saved.collectives.pop("poll")
    else:
        side.wait_written()
    dist.barrier()
    while not finished:
        with saved.phase("finalize", counter):
            finished = side.poll()


def _remove_earlier(folder: Path) -> None:
    """Remove older checkpoints of the side: the newest is what a resumed job loads."""
    side = folder.name.split("_")[0]
    for each in folder.parent.glob(f"{side}_*"):
        if each != folder:
            shutil.rmtree(each)
