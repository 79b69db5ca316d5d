"""What planning costs one real rank among fake peers, for ``scaling.py``; in a process of its own."""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from guarded_save import written
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import get_write_results_queue
from synthetic_job import Shape, names
from torch.distributed.checkpoint.storage import WriteResult
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ckpt_ext.commit.results import retrieve_results
from megatron_ckpt_ext.compat.mcore import TorchDistSaveShardedStrategy
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.guard import places_digest
from megatron_ckpt_ext.metadata.items import places_of
from megatron_ckpt_ext.metadata.layout import Slice
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.held import held_in_sharded_state_dict
from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

__all__ = ["Planned", "planned"]

RANK = 1
"""A rank that is not the coordinator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Seconds of one rank's planning, by repetition."""

    stock: list[float]
    """Of a steady save with a constant structure."""
    ours: list[float]
    guard: list[float]
    """Of it and of the judgement behind the write: comparing with the slice what is held and what was written."""


def planned(shape: Shape, directory: str, repetitions: int) -> Planned:
    """Plan steady saves of one rank in a job of fake peers, ours and stock's in turn.

    Both plan locally there, so that the peers, who say nothing, are not missed.
    """
    os.environ.update(RANK=str(RANK), WORLD_SIZE=str(shape.ranks))
    get_write_results_queue(mp_mode="fork")  # as Megatron does at start-up
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=shape.ranks)
    try:
        torch.set_num_threads(1)
        return _plan(shape, Path(directory), repetitions)
    finally:
        dist.destroy_process_group()


def _plan(shape: Shape, directory: Path, repetitions: int) -> Planned:
    held = held_in_sharded_state_dict(_state(shape))
    writer, _, _ = written(_state(shape), directory / "first")
    results, failure = retrieve_results(writer)
    if failure is not None:
        raise RuntimeError(failure)
    own = Slice(rank=RANK, locators=places_of(results), held=held)
    prepared = PreparedMetadata.create(own, Fingerprint())
    ours = PreparedSaveStrategy(cached_metadata=True, prepared_metadata=prepared)
    stock = TorchDistSaveShardedStrategy(cached_metadata=True)
    found = Planned(stock=[], ours=[], guard=[])
    for number in range(-3, repetitions):  # the structure is constant to NVRx from the third save on
        seconds = {
            "stock": _timed(lambda state: stock.async_save(state, directory / "stock"), shape),
            "ours": _timed(lambda state: ours.async_save(state, directory / "ours"), shape),
            "guard": _timed(lambda state: _guard(prepared, state, results), shape),
        }
        if number >= 0:
            found.stock.append(seconds["stock"])
            found.ours.append(seconds["ours"])
            found.guard.append(seconds["guard"])
    return found


def _guard(prepared: PreparedMetadata, state: dict[str, Any], results: Sequence[WriteResult]) -> None:
    drift = prepared.held_drift(held_in_sharded_state_dict(state))
    if drift is not None or places_digest(places_of(results)) != prepared.places:
        raise RuntimeError(f"the save to be measured does not follow its slice: {drift}")


def _timed(step: Callable[[dict[str, Any]], object], shape: Shape) -> float:
    state = _state(shape)
    start = time.perf_counter()
    step(state)
    return time.perf_counter() - start


def _state(shape: Shape) -> dict[str, Any]:
    """Build the sharded state dict of the rank; tiny tensors, for planning does not look into them."""
    data = torch.zeros(1, 4)
    state = {}
    named = list(itertools.islice(names(shape), shape.total // shape.chunks))
    for entry in range(RANK, shape.total, shape.ranks):
        tensor, chunk = divmod(entry, shape.chunks)
        state[f"{named[tensor]}.{chunk}"] = ShardedTensor.from_rank_offsets(
            named[tensor], data, (0, chunk, shape.chunks)
        )
    return state
