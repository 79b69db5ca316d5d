"""The planner of ``fsdp_dtensor``: torch's, with items and offsets that were found out before, and with slots."""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_ckpt_ext.compat.dtensor import DTensor, flattened, local_of
from megatron_ckpt_ext.metadata.items import item_of
from megatron_ckpt_ext.metadata.layout import Item
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.metadata.slots import padded, slot_size
from megatron_ckpt_ext.plan.dtensor_holdings import Entry

__all__ = ["DtensorSavePlanner", "Placed", "moved"]

type Offset = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """An entry and where its shard lies."""

    entry: Entry
    offset: Offset | None
    """Global offset; ``None`` for an object."""
    writes: bool = True
    """Whether this rank writes it."""
    was: Item | None = None
    """What a layout calls that shard of this rank whose place now nobody knows yet."""

    @property
    def item(self) -> Item:
        """Its name in a layout."""
        return Item(self.entry.key, self.offset)


class DtensorSavePlanner(DefaultSavePlanner):
    """A ``DefaultSavePlanner`` that plans what it is told, on each rank alone, and pads non-tensor items to slots.

    Attributes:
        lengths: bare length of each non-tensor item, in bytes, once its data was resolved.
    """

    can_run_decentralized_global_plan = True

    def __init__(self, state_dict: Mapping[str, Any], prepared: PreparedMetadata | None) -> None:
        """Flatten the state dict. No collectives.

        Args:
            state_dict: flat or nested.
            prepared: the layout that the save follows, for its slots.
        """
        super().__init__()
        self.state_dict, self.mappings = flattened(state_dict)
        self.lengths: dict[Item, int] = {}
        self._slots = {} if prepared is None else prepared.slice.locators

    def release(self) -> None:
        """Let go of the state dict; what comes is made of plans."""
        self.state_dict = {}

    def plan_of(self, placed: Iterator[Placed]) -> SavePlan:
        """Return the plan to write what is marked so, in order."""
        items = [_write_item(each, self.state_dict[each.entry.key]) for each in placed if each.writes]
        return SavePlan(items, planner_data=self.mappings)

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Return the plan as it is: who writes what was decided before."""
        return local_plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is to be saved: the shard of this rank, or the object.

        Raises:
            ValueError: its memory is released; to copy it would end the process.
        """
        found = super().lookup_object(index)
        if isinstance(found, torch.Tensor) and found.numel() and not found.untyped_storage().size():
            raise ValueError(
                f"the memory of {index.fqn} is released, by an offload for instance: bring it back before the save"
            )
        return found

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Serialize a non-tensor item and fill it up to its slot."""
        data = super().transform_object(write_item, object)
        if write_item.type != WriteItemType.BYTE_IO:
            return data
        archive, item = bytes(data.getbuffer()), item_of(write_item.index)
        self.lengths[item] = len(archive)
        locator = self._slots.get(item)
        filled = None if locator is None else padded(archive, locator.length)
        return io.BytesIO(filled or padded(archive, slot_size(len(archive))) or archive)


def moved(item: WriteItem, offset: Offset) -> WriteItem:
    """Return the item of a shard with another offset."""
    data = item.tensor_data
    if data is None:
        return item
    chunk = replace(data.chunk, offsets=torch.Size(offset))
    return replace(item, index=MetadataIndex(item.index.fqn, offset), tensor_data=replace(data, chunk=chunk))


def _write_item(placed: Placed, value: Any) -> WriteItem:
    entry, offset = placed.entry, placed.offset
    if offset is None:
        return WriteItem(index=MetadataIndex(entry.key), type=WriteItemType.BYTE_IO)
    local = local_of(value) if isinstance(value, DTensor) else value
    return WriteItem(
        index=MetadataIndex(entry.key, offset),
        type=WriteItemType.TENSOR if entry.spread is None else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(entry.sizes)),
            properties=TensorProperties.create_from_tensor(local),
            size=torch.Size(entry.shape),
        ),
    )
