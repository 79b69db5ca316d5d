"""The plans and write results of a large job, made up: names as in a mixture-of-experts Megatron model."""

import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.compat.dcp import StorageInfo
from megatron_ckpt_ext.metadata.items import places_of
from megatron_ckpt_ext.metadata.layout import Slice
from megatron_ckpt_ext.plan.async_plan import held_in_plan

__all__ = ["Shape", "names", "plan_of", "results_of", "slice_of"]

CHUNKS, ROWS, COLUMNS, FILES = 64, 16, 1024, 2
GROUPS = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "optimizer.state.fp32_param.")
PARTS = ("mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight")
EXPERTS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How large a job is. Its tensors are cut into as many chunks as there are ranks, at most 64."""

    entries: int
    """Chunks of all tensors together, wanted; ``total`` is what comes out."""
    ranks: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Read ``ENTRIESxRANKS``."""
        entries, ranks = text.split("x")
        return cls(entries=int(entries), ranks=int(ranks))

    @property
    def chunks(self) -> int:
        """Chunks of a tensor."""
        return min(CHUNKS, self.ranks)

    @property
    def total(self) -> int:
        """Entries: whole tensors only."""
        return self.entries // self.chunks * self.chunks

    @property
    def of_a_rank(self) -> int:
        """Entries that rank 1 writes; no rank writes more than one more."""
        return len(range(1, self.total, self.ranks))


def names(shape: Shape) -> Iterator[str]:
    """Yield the name of each tensor."""
    layers = itertools.count()
    while True:
        layer = next(layers)
        for expert, part, group in itertools.product(range(EXPERTS), PARTS, GROUPS):
            yield f"{group}module.decoder.layers.{layer}.{part}{expert}"


def plan_of(shape: Shape, rank: int, named: list[str]) -> SavePlan:
    """Build the plan of one rank; ``named`` has the name of each tensor."""
    items = []
    properties = TensorProperties(dtype=torch.bfloat16)
    for entry in range(rank, shape.total, shape.ranks):
        tensor, chunk = divmod(entry, shape.chunks)
        offsets = torch.Size((chunk * ROWS, 0))
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size((ROWS, COLUMNS))),
            properties=properties,
            size=torch.Size((shape.chunks * ROWS, COLUMNS)),
        )
        index = MetadataIndex(named[tensor], offsets)
        items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    # The coordinator's plans have come over the wire: a rank's strings are its own.
    plan: SavePlan = pickle.loads(pickle.dumps(SavePlan(items)))
    return plan


def results_of(plan: SavePlan, rank: int) -> list[WriteResult]:
    """Build what the writer of a rank reports."""
    length = 2 * ROWS * COLUMNS + 1189
    results = []
    for number, item in enumerate(plan.items):
        offset, file = divmod(number, FILES)
        info = StorageInfo(f"__{rank}_{file}.distcp", offset * length, length)
        results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))
    received: list[WriteResult] = pickle.loads(pickle.dumps(results))
    return received


def slice_of(plan: SavePlan, results: list[WriteResult], rank: int) -> Slice:
    """Build the part of a prepared metadata that belongs to a rank."""
    return Slice(rank=rank, locators=places_of(results), held=held_in_plan(plan))
