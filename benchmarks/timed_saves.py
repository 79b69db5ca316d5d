"""On real ranks: timed saves of one state, by stock megatron-core with NVRx and by us, one after the other.

Imported by the ranks only. All saves go through ``dist_checkpointing.save`` without validation, which is the same on
both sides, and end with NVRx's own ``AsyncRequest.execute_sync``: planning, writing with fsync, a barrier, finalizing.
"""

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from sides import Phases, Side, State, rotated

from megatron_ckpt_ext.commit.commit import Committed, How
from megatron_ckpt_ext.compat.mcore import TorchDistSaveShardedStrategy
from megatron_ckpt_ext.emulation import CpuEmulation
from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

__all__ = ["time_on_rank"]


@dataclass(kw_only=True, slots=True)
class Saver:
    """One side: its strategy, and what became of its saves."""

    strategy: Any
    published: list[Committed] = field(default_factory=list)
    """Its saves that were published; stays empty for stock."""


def time_on_rank(state: State, repetitions: int, directory: str) -> dict[Side, list[Phases]]:
    """Save each side once a round, all sides in turn; the first two rounds, which make the layouts, do not count.

    Called on all ranks, inside the CPU emulation: stock finalize asks for the current CUDA device.
    """
    logging.getLogger("megatron_ckpt_ext").setLevel(logging.ERROR)  # a rebuild warns, and this one is on purpose
    with CpuEmulation(megatron=False):
        savers = {side: _saver(side, directory) for side in Side}
        times: dict[Side, list[Phases]] = {side: [] for side in Side}
        for number in range(-2, repetitions):
            for side in rotated(number):
                folder = Path(directory, f"{side.name}_{number}")
                changed = side.drifts and number % 2 == 0
                phases = _timed(savers[side].strategy, synthetic(state, changed=changed), folder)
                if number >= 0:
                    _check(side, savers[side])
                    times[side].append(phases)
        return times


def synthetic(state: State, *, changed: bool) -> dict[str, Any]:
    """Build this rank's sharded state dict, with new values; ``changed`` adds one small tensor on the last rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    content: dict[str, Any] = {}
    if changed and rank == world - 1:
        content["added"] = ShardedTensor.from_rank_offsets("added", torch.randn(64))
    for number in range(state.tensors):
        content[f"weight.{number}"] = ShardedTensor.from_rank_offsets(
            f"decoder.part_{number}.weight", torch.randn(state.elements), (0, rank, world)
        )
    for number in range(state.items):
        content[f"object.{number}"] = ShardedObject(
            f"decoder.part_{number}._extra_state", {"amax": torch.randn(64)}, (world,), (rank,)
        )
    return content


def _saver(side: Side, directory: str) -> Saver:
    if side.is_stock:
        return Saver(strategy=TorchDistSaveShardedStrategy(cached_metadata=side is Side.STOCK_CONSTANT))
    published: list[Committed] = []
    strategy = PreparedSaveStrategy(
        ckpt_metadata_create_path=f"{directory}/{side.name}.prepared", on_commit=published.append
    )
    return Saver(strategy=strategy, published=published)


def _check(side: Side, saver: Saver) -> None:
    """Refuse to report a save that took another way than the one to be measured."""
    if side.is_stock:
        return
    how, wanted = saver.published[-1].how, How.REBUILT if side.drifts else How.REUSED
    if how is not wanted:
        raise RuntimeError(f"the save {side.value!r} was {how}, so it does not measure one that is {wanted}")


def _timed(strategy: Any, state_dict: dict[str, Any], folder: Path) -> Phases:
    folder.mkdir(exist_ok=True)
    written: list[float] = []
    dist.barrier()
    start, computed = time.perf_counter(), time.thread_time()
    request = dist_checkpointing.save(
        state_dict, str(folder), strategy, validate_access_integrity=False, async_sharded_save=True
    )
    planned = time.perf_counter()
    request.finalize_fns.insert(0, _noting(written))
    request.execute_sync()
    end, computed = time.perf_counter(), time.thread_time() - computed
    dist.barrier()
    if not (folder / ".metadata").exists():
        raise RuntimeError(f"the save left no .metadata in {folder}")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return Phases(plan=planned - start, write=written[0] - planned, finalize=end - written[0], cpu=computed)


def _noting(times: list[float]) -> Callable[[], None]:
    return lambda: times.append(time.perf_counter())
