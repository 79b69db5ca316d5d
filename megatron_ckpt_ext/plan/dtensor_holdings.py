"""Describing what a rank holds of a state dict of DTensors, tensors and objects. No collectives."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Self

import torch

from megatron_ckpt_ext.compat.dtensor import (
    DeviceMesh,
    DTensor,
    ShardedTensor,
    innermost_first,
    is_partial,
    local_of,
    shard_dim,
    split_factor,
)
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.metadata.items import OBJECT, describe_tensor

__all__ = ["DtensorHoldings", "Entry", "Spread", "description"]

type Shape = tuple[int, ...]


class Spread(NamedTuple):
    """How a tensor lies on a mesh, and where on it this rank is: plain data, and equal on all ranks but the last."""

    ranks: str
    """Digest of the mesh: its ranks and their order."""
    mesh: Shape
    """Shape of the mesh."""
    shards: tuple[int | None, ...]
    """Tensor dimension that each mesh dimension shards; ``None`` where it replicates."""
    strides: Shape
    """Split factor of each mesh dimension, 1 but for strided placements."""
    order: Shape
    """Mesh dimensions, the one whose shards lie closest together first."""
    coordinate: Shape
    """Of this rank."""

    @property
    def is_first_replica(self) -> bool:
        """Whether no replica comes before that of this rank."""
        return not any(at for dim, at in zip(self.shards, self.coordinate, strict=False) if dim is None)

    def __str__(self) -> str:
        """Return a text that is different for every other spread."""
        placements = ",".join(
            "R" if dim is None else f"S{dim}" if stride == 1 else f"S{dim}/{stride}"
            for dim, stride in zip(self.shards, self.strides, strict=True)
        )
        at, mesh = ("x".join(map(str, shape)) for shape in (self.coordinate, self.mesh))
        return f"{placements} at {at} of {mesh} ranks {self.ranks}"


class Entry(NamedTuple):
    """One leaf of a state dict on this rank."""

    key: str
    """In the flat state dict."""
    dtype: torch.dtype | None = None
    """``None`` for an object, which has nothing of what follows."""
    sizes: Shape = ()
    """Shape of what this rank holds."""
    shape: Shape = ()
    """Shape of the whole tensor."""
    spread: Spread | None = None
    """Of a DTensor; ``None``: every rank that has the key holds all of it."""

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have different parts of it."""
        return self.spread is not None and any(dim is not None for dim in self.spread.shards)

    @property
    def is_empty_shard(self) -> bool:
        """Whether there is nothing of it here, though there is elsewhere: such a shard is no item of a checkpoint."""
        return self.spread is not None and 0 in self.sizes and 0 not in self.shape


@dataclass(frozen=True, slots=True)
class DtensorHoldings:
    """All leaves of a rank, in the order of its state dict. Equal ones have equal plans, made of nothing else."""

    entries: Sequence[Entry]

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Self:
        """Read a flat state dict. DTensors of meshes without this rank are left out, as torch's planner does.

        Raises:
            ConfigurationError: a tensor is of a kind that cannot be saved; with its key.
        """
        spread = cache(_spread)  # a model has few meshes and placements, and thousands of tensors
        entries = (_entry(key, value, spread) for key, value in flat.items())
        return cls([entry for entry in entries if entry is not None])


def description(entry: Entry, *, with_spread: bool) -> str:
    """Describe an entry: all that decides its bytes, and with its spread also whose bytes they are."""
    if entry.dtype is None:
        return OBJECT
    plain = describe_tensor(entry.dtype, entry.sizes, entry.shape)
    return f"{plain}, {entry.spread}" if with_spread and entry.spread is not None else plain


def _entry(key: str, value: object, spread: Any) -> Entry | None:
    if isinstance(value, ShardedTensor):
        raise ConfigurationError(f"{key} is a ShardedTensor (FSDP1): only DTensors, tensors and objects can be saved")
    if isinstance(value, DTensor):
        if value.device_mesh.get_coordinate() is None:
            return None
        if any(map(is_partial, value.placements)):
            raise ConfigurationError(f"{key} has the placements {value.placements}: reduce it before it is saved")
        on_mesh = spread(value.device_mesh, value.placements)
        return Entry(key, value.dtype, tuple(local_of(value).shape), tuple(value.shape), on_mesh)
    if isinstance(value, torch.Tensor):
        return Entry(key, value.dtype, tuple(value.shape), tuple(value.shape))
    return Entry(key)


def _spread(mesh: DeviceMesh, placements: tuple[object, ...]) -> Spread:
    ranks = repr(mesh.mesh.tolist()).encode()
    return Spread(
        ranks=hashlib.blake2b(ranks, digest_size=6).hexdigest(),
        mesh=tuple(mesh.mesh.shape),
        shards=tuple(map(shard_dim, placements)),
        strides=tuple(map(split_factor, placements)),
        order=innermost_first(mesh, placements),
        coordinate=tuple(mesh.get_coordinate() or ()),
    )
