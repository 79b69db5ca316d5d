"""Describing everything a rank holds, written by it or not, at the start of a save. No collectives."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from megatron_ckpt_ext.compat.mcore import ShardedObject, ShardedTensor, nested_values
from megatron_ckpt_ext.metadata.items import OBJECT, describe_tensor, item_of, merge_descriptions
from megatron_ckpt_ext.metadata.layout import Item

__all__ = ["held_in_plan", "held_in_sharded_state_dict"]


def held_in_sharded_state_dict(sharded_state_dict: Mapping[str, Any]) -> dict[Item, str]:
    """Describe every shard in Megatron's sharded state dict, whatever its replica id.

    Replica ids are left out: the save distribution rewrites them, and who writes a shard is the layout's
    business.
    """
    return merge_descriptions(_described(nested_values(sharded_state_dict)))


def held_in_plan(plan: SavePlan) -> dict[Item, str]:
    """Describe every item of a local plan; right for a state dict that is planned without deduplication."""
    return merge_descriptions(
        (
            item_of(write.index),
            OBJECT
            if write.tensor_data is None
            else describe_tensor(
                write.tensor_data.properties.dtype, write.tensor_data.chunk.sizes, write.tensor_data.size
            ),
        )
        for write in plan.items
    )


def _described(entries: Iterable[Any]) -> Iterator[tuple[Item, str]]:
    describe = cache(_describe_shard)  # the layers of a model repeat their shapes
    for entry in entries:
        if isinstance(entry, ShardedTensor):
            item = Item(entry.key, tuple(entry.global_offset))
            shapes = tuple(entry.local_shape), tuple(entry.global_shape)
            yield item, describe(entry.dtype, entry.prepend_axis_num, *shapes)
        elif isinstance(entry, ShardedObject):
            yield Item(entry.unique_key, None), OBJECT


def _describe_shard(dtype: Any, prepended: int, local_shape: tuple[int, ...], global_shape: tuple[int, ...]) -> str:
    return describe_tensor(dtype, (1,) * prepended + local_shape, global_shape)
