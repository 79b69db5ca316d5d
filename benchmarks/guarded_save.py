"""One real gloo rank: a save that followed a prepared file, and what slots and layout guard cost it."""

import io
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from report import Spread
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.commit.finalize import save_state_dict_async_finalize
from megatron_ckpt_ext.commit.results import retrieve_results
from megatron_ckpt_ext.compat.mcore import save_planner, to_pyt_state_dict
from megatron_ckpt_ext.compat.nvrx import FileSystemWriterAsync, non_tensor_items
from megatron_ckpt_ext.metadata.guard import places_digest
from megatron_ckpt_ext.metadata.items import places_of
from megatron_ckpt_ext.metadata.layout import Item
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.async_plan import PlanResult, save_state_dict_async_plan
from megatron_ckpt_ext.plan.held import Holdings, held_in_sharded_state_dict
from megatron_ckpt_ext.plan.padding import pad_non_tensor_items

__all__ = [
    "ELSEWHERE",
    "PER_ITEM_MS",
    "PER_THOUSAND_TENSORS_MS",
    "STEADY",
    "Row",
    "Size",
    "measure",
    "one_rank",
    "written",
]

PER_THOUSAND_TENSORS_MS, PER_ITEM_MS = 3.0, 0.1
STEADY = ("holdings", "slots", "held drift")
"""What the training thread does in every save."""
ELSEWHERE = ("describe", "layout")
"""On the training thread in the first save and when shards have changed; and in the writer process."""
LAYERS, SHAPES = 64, 12
"""Tensors of one key, and tensors of a layer that differ in shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much the rank holds, and writes all of."""

    tensors: int
    items: int
    item_bytes: int

    @property
    def limit_ms(self) -> float:
        """What slots and guard may cost the training thread together."""
        return PER_THOUSAND_TENSORS_MS * self.tensors / 1000 + PER_ITEM_MS * self.items


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one size cost, in milliseconds."""

    size: Size
    parts: Mapping[str, Spread]
    cpu: Spread
    """Of the training thread in a steady save; ``wall`` as well."""
    wall: Spread
    limit_ms: float

    @property
    def within_limit(self) -> bool:
        """Whether the median is."""
        return self.cpu.median <= self.limit_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """A save that followed a prepared file, taken apart where slots and guard come in."""

    prepared: PreparedMetadata
    state_dict: dict[str, Any]
    """Of the next save: equal to that of this one, and nothing in it by identity."""
    holdings: Holdings
    held: Mapping[Item, str]
    writer: Any
    archives: Sequence[bytes]
    """The non-tensor items before they were padded."""
    results: Sequence[WriteResult]


@contextmanager
def one_rank() -> Iterator[None]:
    """Be the only rank of a job."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, not re-exported
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def synthetic(size: Size) -> dict[str, Any]:
    """Build a sharded state dict as Megatron has it: one key for the same tensor of every layer, nested folders."""
    state: dict[str, Any] = {"model": {}, "extra_state": {}}
    for name in range(math.ceil(size.tensors / LAYERS)):
        layers = min(LAYERS, size.tensors - name * LAYERS)
        data = torch.zeros(2 + name % SHAPES, 3)
        for layer in range(layers):
            key = f"decoder.layers.self_attention.part_{name}.weight"
            state["model"][f"layers.{layer}.{key}"] = ShardedTensor.from_rank_offsets(
                key, data, (0, layer, layers), prepend_axis_num=1
            )
    for number in range(size.items):
        key = f"decoder.layers.{number}.self_attention._extra_state"
        content = {"amax": torch.zeros(size.item_bytes, dtype=torch.uint8), "number": number}
        state["extra_state"][key] = ShardedObject(key, content, (1,), (0,))
    return state


def saved(size: Size, directory: Path) -> Save:
    """Save twice; return the second save, which followed the first one's file."""
    file = str(directory / "prepared.metadata")
    state_dict = synthetic(size)
    save_state_dict_async_finalize(*written(state_dict, directory / "first"), create_metadata_path=file)
    prepared = PreparedMetadata.load(file, 0, 1)
    writer, planned, _ = written(state_dict, directory / "second", prepared)
    results, failure = retrieve_results(writer)
    drift = planned.drift or (None if places_digest(places_of(results)) == prepared.places else "another layout")
    if failure or drift:
        raise RuntimeError(f"the save to be measured did not follow the layout: {failure or drift}")
    resolve = planned.planner.resolve_data
    return Save(
        prepared=prepared,
        state_dict=synthetic(size),
        holdings=Holdings.of(state_dict),
        held=planned.held,
        writer=writer,
        archives=[resolve(write).getvalue() for write in non_tensor_items(writer)[0]],
        results=results,
    )


def written(state_dict: dict[str, Any], directory: Path, prepared: PreparedMetadata | None = None) -> PlanResult:
    """Plan one save and write its files; what is left to do is to finalize it. Called on all ranks, no collectives."""
    directory.mkdir()
    result = save_state_dict_async_plan(
        to_pyt_state_dict(dict(state_dict), keep_only_main_replica=True),
        FileSystemWriterAsync(directory, thread_count=1),
        planner=save_planner(keep_only_main_replica=True),
        reuse_metadata_obj=prepared,
        held_items=held_in_sharded_state_dict(state_dict),
    )
    function, preload, (rank, _, queue) = result.storage_writer.get_save_function_and_args()
    function(rank, preload(), queue)
    return result


def measure(size: Size, repetitions: int) -> Row:
    """Save, then repeat what slots and guard did; each repetition runs all parts once, in the order of a save."""
    with tempfile.TemporaryDirectory(prefix="guard-") as directory:
        save = saved(size, Path(directory))
    _once(save)
    rounds = [_once(save) for _ in range(repetitions)]
    return Row(
        size=size,
        parts={part: Spread.of([1000 * each[part][0] for each in rounds]) for part in (*STEADY, *ELSEWHERE)},
        cpu=Spread.of([1000 * sum(each[part][0] for part in STEADY) for each in rounds]),
        wall=Spread.of([1000 * sum(each[part][1] for part in STEADY) for each in rounds]),
        limit_ms=size.limit_ms,
    )


def _once(save: Save) -> dict[str, tuple[float, float]]:
    """CPU and wall seconds of each part."""
    _, streams = non_tensor_items(save.writer)
    streams[:] = [io.BytesIO(archive) for archive in save.archives]
    steps: dict[str, Callable[[], bool]] = {
        "holdings": lambda: Holdings.of(save.state_dict) == save.holdings,
        "slots": lambda: len(pad_non_tensor_items(save.writer, save.prepared)) == len(save.archives),
        "held drift": lambda: save.prepared.held_drift(save.held) is None,
        "describe": lambda: save.holdings.held() == save.held,
        "layout": lambda: places_digest(places_of(save.results)) == save.prepared.places,
    }
    return {part: _timed(step) for part, step in steps.items()}


def _timed(step: Callable[[], bool]) -> tuple[float, float]:
    cpu, wall = time.thread_time(), time.perf_counter()
    as_in_a_save = step()
    seconds = time.thread_time() - cpu, time.perf_counter() - wall
    if not as_in_a_save:
        raise RuntimeError("the save to be measured does not follow its layout, or its plan is not the one before")
    return seconds
