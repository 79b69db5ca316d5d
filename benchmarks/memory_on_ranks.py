"""On real ranks: the memory of trainers and writers over many saves of one side. Imported by the ranks only."""

import ctypes
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from asynchronous_jobs import AsynchronousJob, OurJob, StockJob
from processes import memory_of
from sharded_state import SavedState
from sides import State
from watching import children, resident_bytes

from megatron_ckpt_ext.compat.nvrx import forget_what_the_writer_has
from megatron_ckpt_ext.emulation import CpuEmulation

__all__ = ["Memory", "memory_on_rank"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one process: see ``processes.memory_of``."""

    resident: list[int]
    """After each save of the steady state."""
    after: dict[str, int]
    """After the last save."""


def memory_on_rank(side: str, state: State, warm: int, saves: int, workers: int, directory: str) -> dict[str, Memory]:
    """Save ``warm`` times and ``saves`` times more; return the memory of this rank's trainer and writer.

    Called on all ranks, inside the CPU emulation.
    """
    forget_what_the_writer_has()
    with CpuEmulation(megatron=False):
        job: AsynchronousJob = StockJob(directory, workers) if side == "stock" else OurJob(directory, workers)
        held = SavedState(state)
        resident: dict[str, list[int]] = {"trainer": [], "writer": []}
        pids = {"trainer": os.getpid()}
        others = children()
        try:
            job.resume()
            after: dict[str, dict[str, int]] = {}
            for number in range(warm + saves):
                _save(job, held, number, Path(directory, f"{side}_{number}"))
                if number == 0:
                    pids["writer"] = _largest(children() - others)
                if number >= warm:
                    after = {name: memory_of(pid) for name, pid in pids.items()}
                    _give_back_free_memory()
                    for name, pid in pids.items():
                        resident[name].append(resident_bytes(pid))
        finally:
            job.close()
        dist.barrier()  # no rank ends long before another
        return {name: Memory(resident=resident[name], after=after[name]) for name in pids}


def _give_back_free_memory() -> None:
    """Free pages of the heap that become resident one by one are no growth.

    NVRx allocates its shared buffers with ``torch.empty`` first, which leaves a hole of their size in the heap; each
    save touches a few more of its pages, in stock as in ours, until all of it is resident.
    """
    ctypes.CDLL(None).malloc_trim(0)


def _save(job: AsynchronousJob, held: SavedState, number: int, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    dist.barrier()
    job.schedule(job.save(held.sharded(number), folder))
    job.wait_written()
    while not job.poll():
        pass
    dist.barrier()
    job.check(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def _largest(pids: set[int]) -> int:
    return max(pids, key=resident_bytes)
