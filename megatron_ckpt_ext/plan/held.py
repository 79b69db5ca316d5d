"""Describing everything a rank holds, written by it or not, at the start of a save. No collectives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from megatron_ckpt_ext.compat.mcore import ShardedObject, ShardedTensor, nested_values, refuse_released_storage
from megatron_ckpt_ext.metadata.items import OBJECT, describe_tensor, merge_descriptions
from megatron_ckpt_ext.metadata.layout import Item

__all__ = ["Holdings", "Shard", "held_in_sharded_state_dict"]


_TENSOR = attrgetter("key", "global_offset", "global_shape", "replica_id", "local_shape", "dtype", "prepend_axis_num")


class Shard(NamedTuple):
    """One shard of a rank, as Megatron describes it."""

    key: str
    """Of the tensor; an object's names its shard."""
    offset: Sequence[int] | None
    """Global offset; ``None`` for an object, which has nothing of what follows."""
    global_shape: Sequence[int]
    """Of the whole tensor."""
    replica_id: Any
    """Tells who writes it."""
    local_shape: Sequence[int] = ()
    """Of the shard."""
    dtype: Any = None
    """Of the tensor."""
    prepended: int = 0
    """Number of leading axes that the shard lacks."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """All shards of a rank, in the order of its state dict. Equal ones have equal plans, made of nothing else."""

    shards: Sequence[Shard]

    @classmethod
    def of(cls, sharded_state_dict: Mapping[str, Any]) -> "Holdings":
        """Read Megatron's sharded state dict, after its replicas were distributed. No collectives.

        Raises:
            ValueError: the memory of a tensor is released; to copy it would end the process.
        """
        return cls([shard for entry in nested_values(sharded_state_dict) if (shard := _shard(entry)) is not None])

    def held(self) -> dict[Item, str]:
        """Describe every shard, whatever its replica id: who writes it is the layout's business."""
        describe = cache(_describe_shard)  # the layers of a model repeat their shapes
        return merge_descriptions(_named(shard, describe) for shard in self.shards)


def held_in_sharded_state_dict(sharded_state_dict: Mapping[str, Any]) -> dict[Item, str]:
    """Describe every shard in Megatron's sharded state dict, whatever its replica id. No collectives."""
    return Holdings.of(sharded_state_dict).held()


def _shard(entry: Any) -> Shard | None:
    if isinstance(entry, ShardedTensor):
        refuse_released_storage(entry)
        return Shard._make(_TENSOR(entry))
    if isinstance(entry, ShardedObject):
        return Shard(entry.unique_key, None, (), entry.replica_id)
    return None


def _named(shard: Shard, describe: Callable[..., str]) -> tuple[Item, str]:
    if shard.offset is None:
        return Item(shard.key, None), OBJECT
    shapes = tuple(shard.local_shape), tuple(shard.global_shape)
    return Item(shard.key, tuple(shard.offset)), describe(shard.dtype, shard.prepended, *shapes)


def _describe_shard(dtype: Any, prepended: int, local_shape: tuple[int, ...], global_shape: tuple[int, ...]) -> str:
    return describe_tensor(dtype, (1,) * prepended + local_shape, global_shape)
