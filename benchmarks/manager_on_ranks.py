"""On real ranks: saves of a ``CheckpointManager``, copies of the same bytes, and a writer that sleeps.

Imported by the ranks only.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import memory_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_ckpt_ext import CheckpointManager
from megatron_ckpt_ext.staging.stage import HostStager

__all__ = ["Found", "Round", "SlowRound", "save_on_rank"]

STEP_SECONDS = 0.04
QUIET_STEPS = 7
SIDE = 256
"""Of the matrices of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Seconds of one round on one rank."""

    copy: float
    """A plain copy into memory that is there."""
    save: float
    """The call of a warm asynchronous save."""
    durable: float
    """From that call until the checkpoint is published."""
    synchronous: float
    """A synchronous save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRound:
    """Seconds on one rank with a slow writer."""

    before: float
    """A step without a save in flight, the median."""
    save: float
    """The call of the save."""
    during: float
    """A step in the time that the write must take, the median."""
    written: float
    """From the return of the call until the checkpoint was durable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What one rank found."""

    staged: int
    """Bytes of the state on this rank."""
    first: float
    """Seconds of the first asynchronous save."""
    staging: int
    """Private bytes that staging alone adds."""
    stays: int
    """Private bytes that the first asynchronous save added, once it was durable."""
    peak: int
    """Resident bytes that it added at most."""
    synchronous_peak: int
    """The same of a synchronous save."""
    rounds: list[Round]
    slow: list[SlowRound]


class Sleeper:
    """An object whose pickling sleeps: a slow writer that computes nothing. Staging takes no copy of it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __deepcopy__(self, _memo: Any) -> "Sleeper":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(self._seconds)
        return float, (self._seconds,)


def save_on_rank(tensors: int, elements: int, repetitions: int, slow_steps: int, directory: str) -> Found:
    """Measure one rank. Called on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    folder = Path(directory)

    def sharded(count: int, size: int) -> dict[str, Any]:
        return {f"{i:03d}": DTensor.from_local(torch.full((size,), float(i)), mesh, [Shard(0)]) for i in range(count)}

    state = sharded(tensors, elements)
    locals_ = [value.to_local() for value in state.values()]
    copies = [each.clone() for each in locals_]
    staging = _staging(state)
    with _manager(folder / "before") as manager:  # what is imported and allocated once in a process
        manager.save(1, sharded(4, 16))
    with _manager(folder / "asynchronous") as manager, _manager(folder / "synchronous", async_save=False) as other:
        first, stays, peak = _first_save(manager, state)
        *_, synchronous_peak = _first_save(other, state)
        rounds = [
            _round(number, manager, other, state, lambda: _copy(copies, locals_))
            for number in range(2, 2 + repetitions)
        ]
    slow = _slow_rounds(folder / "slow", sharded(4, 1 << 14), repetitions, slow_steps)
    dist.barrier()  # no rank ends long before another
    staged = sum(each.nbytes for each in locals_)
    return Found(
        staged=staged,
        first=first,
        staging=staging,
        stays=stays,
        peak=peak,
        synchronous_peak=synchronous_peak,
        rounds=rounds,
        slow=slow,
    )


@contextmanager
def _manager(
    folder: Path, *, async_save: bool = True, on_saved: Callable[[int], None] | None = None
) -> Iterator[CheckpointManager]:
    with CheckpointManager(folder, async_save=async_save, keep_last=1, progress=False, on_saved=on_saved) as manager:
        yield manager


def _staging(state: dict[str, Any]) -> int:
    _give_back_free_memory()
    before = memory_of()["uss"]
    stager = HostStager()
    staged = stager.stage(state)
    grown = memory_of()["uss"] - before
    staged.release()
    stager.close()
    return grown


def _first_save(manager: CheckpointManager, state: dict[str, Any]) -> tuple[float, int, int]:
    _give_back_free_memory()
    before = memory_of()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    first = _timed(lambda: manager.save(1, state))
    manager.wait()
    peak = memory_of()["peak"]
    _give_back_free_memory()
    return first, memory_of()["uss"] - before["uss"], peak - before["rss"]


def _round(
    number: int,
    manager: CheckpointManager,
    synchronous: CheckpointManager,
    state: dict[str, Any],
    copy: Callable[[], None],
) -> Round:
    """Copy and save, each first equally often; nothing is in flight when a time begins."""
    copied = _timed(copy) if number % 2 else 0.0
    began = time.perf_counter()
    saved = _timed(lambda: manager.save(number, state))
    manager.wait()
    durable = time.perf_counter() - began
    copied = copied or _timed(copy)
    return Round(copy=copied, save=saved, durable=durable, synchronous=_timed(lambda: synchronous.save(number, state)))


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _slow_rounds(folder: Path, state: dict[str, Any], repetitions: int, slow_steps: int) -> list[SlowRound]:
    ended: dict[int, float] = {}

    def on_saved(step: int) -> None:
        ended[step] = time.perf_counter()

    step = _training_step()
    # One step longer than what is looked at, since steps are not all alike.
    sleeper = Sleeper((slow_steps + 1) * statistics.median(_timed(step) for _ in range(QUIET_STEPS)))
    rounds = []
    with _manager(folder, on_saved=on_saved) as manager:
        for number in range(1, 1 + repetitions + 1):
            before = statistics.median(_timed(step) for _ in range(QUIET_STEPS))
            saved = _timed(lambda: manager.save(number, {**state, "sleeper": sleeper}))  # noqa: B023
            began = time.perf_counter()
            during = statistics.median(_timed(step) for _ in range(slow_steps))
            manager.wait()
            rounds.append(SlowRound(before=before, save=saved, during=during, written=ended[number] - began))
    return rounds[1:]  # the first save plans together


def _training_step() -> Callable[[], None]:
    """Return a step of about ``STEP_SECONDS``, with as many products on each rank."""
    left, right = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    once = statistics.median(_timed(lambda: left @ right) for _ in range(50))
    products = torch.tensor([STEP_SECONDS / once])
    dist.all_reduce(products, op=dist.ReduceOp.MIN)
    count = max(1, int(products.item()))
    loss = torch.zeros(1)

    def step() -> None:
        for _ in range(count):
            left @ right
        dist.all_reduce(loss)

    return step


def _timed(action: Callable[[], Any]) -> float:
    """Return the seconds of an action that all ranks begin together."""
    dist.barrier()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _give_back_free_memory() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
