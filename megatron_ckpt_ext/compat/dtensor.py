"""Names of torch's DTensor and of Megatron-FSDP that are private or moved between releases.

Read in torch 2.14.1 and megatron-core 0.19.2. ``tests/test_fsdp_dtensor_compat.py`` notices when one of them moves.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = [
    "DTensor",
    "DeviceMesh",
    "ShardedTensor",
    "chunk_of_megatron",
    "flattened",
    "hang_chunk",
    "innermost_first",
    "is_partial",
    "local_of",
    "rewrapped",
    "shard_dim",
    "split_factor",
    "storage_prefix",
    "by_spec",
]


def flattened(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Flatten nested dicts and lists as ``DefaultSavePlanner`` does it; the second maps keys to paths."""
    flat, mappings = flatten_state_dict(dict(state_dict))
    return flat, mappings


def local_of(tensor: DTensor) -> torch.Tensor:
    """Return the local shard, outside autograd and without waiting for anything."""
    return tensor._local_tensor


def by_spec(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and global offset of the local shard as mesh and placements give them. No collectives."""
    sizes, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(sizes), tuple(offset)


def shard_dim(placement: object) -> int | None:
    """Return the dimension that a placement shards, ``None`` if it shards none."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def split_factor(placement: object) -> int:
    """Return the split factor of a strided placement, 1 for any other."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def is_partial(placement: object) -> bool:
    """Whether the tensor is a sum that was not made yet."""
    return isinstance(placement, Partial)


def innermost_first(mesh: DeviceMesh, placements: tuple[object, ...]) -> tuple[int, ...]:
    """Return the mesh dimensions in the order in which Megatron-FSDP adds up the sizes of shards.

    As ``megatron_fsdp.uneven_dtensor.gather_and_compute_chunk_metadata``: what its builder noted on the mesh, else
    strided placements first, then from left to right.
    """
    order = getattr(mesh, "_shard_order", None)
    if order is not None:
        return tuple(reversed(order))
    dims = range(len(placements))
    return (
        *(d for d in dims if split_factor(placements[d]) > 1),
        *(d for d in dims if split_factor(placements[d]) == 1),
    )


def chunk_of_megatron(tensor: DTensor) -> tuple[int, ...] | None:
    """Return the offset that Megatron-FSDP has hung on a shard for torch's planner; ``None`` if it has not."""
    chunks = getattr(local_of(tensor), "__create_chunk_list__", None)
    return None if chunks is None else tuple(chunks()[0].offsets)


def hang_chunk(tensor: DTensor, offset: tuple[int, ...]) -> None:
    """Tell torch's planners where an uneven shard lies: ``update_uneven_dtensor_chunk_metadata`` of Megatron-FSDP."""
    local = local_of(tensor)
    chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=local.shape)

    def write_items(fqn: str, whole: DTensor) -> list[WriteItem]:
        if not local.numel():
            return []
        data = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(local), size=whole.size())
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    setattr(local, "__create_chunk_list__", lambda: [chunk])  # noqa: B010 - not mangled, and on an instance
    setattr(local, "__create_write_items__", write_items)  # noqa: B010


def rewrapped(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor like ``tensor`` around another local shard, outside autograd. No collectives.

    Where an uneven shard lies (``hang_chunk``) is told of the other shard too.
    """
    made = DTensor(local, tensor._spec, requires_grad=False)
    offset = chunk_of_megatron(tensor)
    if offset is not None:
        hang_chunk(made, offset)
    return made


def storage_prefix(rank: int) -> _StoragePrefix:
    """Return what ``FileSystemWriter`` begins the file names of a rank with."""
    return _StoragePrefix(f"__{rank}_")
