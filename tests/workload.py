"""A small Megatron state dict on real ranks, saved through ``dist_checkpointing.save`` with our strategy.

Everything in it is what a real job has: tensors sharded over ranks, data-parallel replicas, objects of each rank and
replicated objects. Functions named ``*_on_rank`` run inside a rank of the pool.
"""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_ckpt_ext import verify_checkpoint
from megatron_ckpt_ext.compat import mcore
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.strategy.fully_parallel import PreparedSaveWrapper
from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

COMMON = {"common_state/shard_0_1"} if mcore.common_beside({}) is None else set()
"""What a release stores beside what the ranks hold; before 0.19 in a file of its own."""
BESIDE = frozenset() if COMMON else frozenset({"common.pt"})
"""Files that Megatron writes before a save is planned."""
ROWS = 4
COLUMNS = 6
HAS_SHARED_MEMORY = hasattr(mcore.TorchDistSaveShardedStrategy(), "cpu_shm_mode")
"""Whether Megatron can ask for it; it can since 0.18."""

type StateDict = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """How a job saves."""

    directory: str
    workers: int = 1
    fully_parallel: bool = False
    cached_distribution: bool = False
    create: str | None = None
    reuse: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def strategy(self) -> Any:
        """Build the strategy of this rank."""
        prepared = None
        if self.reuse is not None:
            prepared = PreparedMetadata.load(self.reuse, dist.get_rank(), dist.get_world_size())
        base = PreparedSaveStrategy(
            thread_count=self.workers,
            prepared_metadata=prepared,
            ckpt_metadata_create_path=self.create,
            **{name: value for name, value in self.extra.items() if name != "cpu_shm_mode" or HAS_SHARED_MEMORY},
        )
        if not self.fully_parallel:
            return base
        return PreparedSaveWrapper(base, do_cache_distribution=self.cached_distribution)


def state(seed: int) -> StateDict:
    """Build this rank's state dict with values that depend on ``seed``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = torch.Generator().manual_seed(1000 * seed + rank)
    shared = torch.Generator().manual_seed(1000 * seed + 999)
    return {
        "model": {
            "weight": ShardedTensor.from_rank_offsets(
                "model.weight", torch.randn(ROWS, COLUMNS, generator=own), (0, rank, world)
            ),
            "bias": ShardedTensor.from_rank_offsets(
                "model.bias", torch.randn(COLUMNS, generator=shared), replica_id=rank
            ),
            "norm": ShardedTensor.from_rank_offsets(
                "model.norm", torch.randn(COLUMNS, generator=shared).to(torch.bfloat16), replica_id=rank
            ),
        },
        "moment": ShardedTensor.from_rank_offsets(
            "optimizer.exp_avg", torch.randn(ROWS, COLUMNS, generator=own), (0, rank, world)
        ),
        "rng": ShardedObject("rng", {"seed": seed, "rank": rank}, (world,), (rank,)),
        "settings": ShardedObject("settings", {"lr": 0.25}, (1,), (0,), replica_id=rank),
    }


def save(strategy: Any, directory: str, state_dict: StateDict) -> None:
    """Run one asynchronous save to its end, in this process; the background function is called directly."""
    Path(directory).mkdir(exist_ok=True)
    dist.barrier()
    request = dist_checkpointing.save(state_dict, directory, strategy, async_sharded_save=True, content_metadata=None)
    request.execute_sync()


def values(state_dict: StateDict) -> dict[str, Any]:
    """Return this rank's content by key, cloned; what a checkpoint of it must hold."""
    held: dict[str, Any] = {}
    for entry in _leaves(state_dict):
        if isinstance(entry, ShardedTensor):
            held[f"{entry.key}@{list(entry.global_offset)}"] = entry.data.clone()
        elif isinstance(entry, ShardedObject):
            held[entry.unique_key] = entry.data
    return held


def checkpoint_values(directory: str) -> dict[str, Any]:
    """Read every chunk and object of a checkpoint through its ``.metadata``, as torch's reader would find them."""
    metadata = FileSystemReader(directory).read_metadata()
    found: dict[str, Any] = {}
    for index, info in metadata.storage_data.items():
        with open(Path(directory) / info.relative_path, "rb") as file:
            file.seek(info.offset)
            data = io.BytesIO(file.read(info.length))
        key = index.fqn if index.offset is None else f"{index.fqn}@{list(index.offset)}"
        loaded = torch.load(data, weights_only=False)
        found[key] = loaded[0] if index.offset is None else loaded  # Megatron stores a list of objects
    return found


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal bit for bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.numel() == right.numel()
            and bool((left.view(-1) == right.view(-1)).all())
        )
    return bool(left == right)


def assert_holds(directory: Path, held_by_rank: list[dict[str, Any]]) -> None:
    """The checkpoint has exactly what the ranks held, bit for bit, and is complete by the one judgement of that."""
    report = verify_checkpoint(directory)
    assert report.complete, report.problems
    found = checkpoint_values(str(directory))
    expected = {key: value for held in held_by_rank for key, value in held.items()}
    assert found.keys() == expected.keys() | COMMON
    assert [key for key, value in expected.items() if not same(found[key], value)] == []
    assert [path.name for path in directory.iterdir() if path.name.endswith(".tmp")] == []


class Warnings(logging.Handler):
    """Keeps what the package warns about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    """Hear the package's warnings on this rank."""
    handler = Warnings()
    logging.getLogger("megatron_ckpt_ext").addHandler(handler)
    try:
        yield handler.messages
    finally:
        logging.getLogger("megatron_ckpt_ext").removeHandler(handler)


def save_series_on_rank(job: Job, seeds: list[int]) -> list[dict[str, Any]]:
    """Save one checkpoint a seed, ``step_SEED``, with all values new each time; return the values of this rank."""
    strategy = job.strategy()
    kept = []
    for seed in seeds:
        state_dict = state(seed)
        kept.append(values(state_dict))
        save(strategy, str(Path(job.directory) / f"step_{seed}"), state_dict)
    return kept


def _leaves(state_dict: Any) -> list[Any]:
    children = state_dict.values() if isinstance(state_dict, dict) else state_dict
    found = []
    for child in children:
        found += _leaves(child) if isinstance(child, dict | list) else [child]
    return found
