"""``compare_checkpoints``: what differs between two checkpoints, in layout and, if asked, in values."""

import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.examine.archive import CHUNK, DamagedArchiveError, content_of
from megatron_ckpt_ext.metadata.layout import Item, Locator
from megatron_ckpt_ext.publish.coverage import Chunk
from megatron_ckpt_ext.publish.recorded import (
    RecordedLayout,
    RecordedTensor,
    UnreadableMetadataError,
    read_layout,
)
from megatron_ckpt_ext.publish.storage.interface import storage_of

__all__ = ["Change", "Side", "comparable", "compare_layouts", "compare_values"]


class Change(NamedTuple):
    """One thing that differs."""

    name: str
    """Tensor or object."""
    what: str
    """What differs, as words: ``"only in the first"`` and the like."""
    largest: float | None = None
    """Largest absolute difference of two elements, where values were compared and can be subtracted."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints."""

    directory: str
    layout: RecordedLayout

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "Side":
        """Read what a checkpoint records. No collectives.

        Raises:
            ConfigurationError: it cannot be read.
        """
        directory = storage_of(os.fspath(path)).directory(os.fspath(path))
        try:
            return cls(directory, read_layout(directory))
        except UnreadableMetadataError as error:
            raise ConfigurationError(
                f"{directory!r} cannot be compared, {error}. Name a checkpoint that is complete"
            ) from error

    def read(self, item: Item) -> torch.Tensor | None:
        """Load a shard; ``None`` if it has no place. Only tensors are loaded, and nothing is run.

        Raises:
            DamagedArchiveError: it holds no tensor.
            OSError: it cannot be read.
        """
        place = self.layout.places.get(item)
        if place is None:
            return None
        with storage_of(self.directory).open(self._path(place)) as file:
            file.seek(place.offset)
            data = file.read(place.length)
        try:
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # whatever bytes there are
            raise DamagedArchiveError(f"it cannot be loaded: {type(error).__name__}: {error}") from error
        if not isinstance(value, torch.Tensor):
            raise DamagedArchiveError("it holds no tensor")
        return value.detach()

    def records(self, item: Item, buffer: bytearray) -> tuple[tuple[str, int, int], ...] | None:
        """Return the checksums of an item's content; raises as ``read``."""
        place = self.layout.places.get(item)
        if place is None:
            return None
        with storage_of(self.directory).open(self._path(place)) as file:
            return content_of(file, place.offset, place.length, buffer).records

    def _path(self, place: Locator) -> str:
        return os.path.join(self.directory, place.path)


def compare_layouts(first: RecordedLayout, second: RecordedLayout) -> Iterator[Change]:
    """Name what one of the two has only, and tensors of other shape, dtype or shards. No I/O."""
    yield from _only(first.tensors.keys() | set(first.objects), second.tensors.keys() | set(second.objects))
    for name in sorted(first.tensors.keys() & second.tensors.keys()):
        ours, theirs = first.tensors[name], second.tensors[name]
        if ours.size != theirs.size or ours.dtype != theirs.dtype:
            yield Change(name, f"{_shape(ours)} in the first, {_shape(theirs)} in the second")
        elif sorted(ours.chunks) != sorted(theirs.chunks):
            yield Change(
                name, f"cut otherwise: {len(ours.chunks)} shards in the first, {len(theirs.chunks)} in the second"
            )


def compare_values(first: Side, second: Side) -> Iterator[Change | None]:
    """Compare content, tensor by tensor and object by object, where both have it in the same shape and dtype.

    One shard of each side is in memory at a time; shards may be cut otherwise. Checksums of equal shards are compared
    only. Yields ``None`` for what is equal, so that progress can be shown.
    """
    buffer = bytearray(CHUNK)
    for name in sorted(set(first.layout.objects) & set(second.layout.objects)):
        yield _reported(name, partial(_object_change, name, first, second, buffer))
    for name in comparable(first.layout, second.layout):
        yield _reported(name, partial(_tensor_change, name, first, second, buffer))


def comparable(first: RecordedLayout, second: RecordedLayout) -> list[str]:
    """Return the tensors that both have in the same shape and dtype."""
    return [
        name
        for name in sorted(first.tensors.keys() & second.tensors.keys())
        if first.tensors[name].size == second.tensors[name].size
        and first.tensors[name].dtype == second.tensors[name].dtype
    ]


def _only(ours: Iterable[str], theirs: Iterable[str]) -> Iterator[Change]:
    yield from (Change(name, "only in the first") for name in sorted(set(ours) - set(theirs)))
    yield from (Change(name, "only in the second") for name in sorted(set(theirs) - set(ours)))


def _shape(tensor: RecordedTensor) -> str:
    return f"{tensor.dtype} {list(tensor.size)}"


def _reported(name: str, compare: Callable[[], Change | None]) -> Change | None:
    try:
        return compare()
    except (DamagedArchiveError, OSError) as error:
        return Change(name, f"cannot be compared: {error}")


def _object_change(name: str, first: Side, second: Side, buffer: bytearray) -> Change | None:
    item = Item(name, None)
    same = first.records(item, buffer) == second.records(item, buffer)
    return None if same else Change(name, "another object")


def _tensor_change(name: str, first: Side, second: Side, buffer: bytearray) -> Change | None:
    differing, largest = 0, 0.0
    chunks = second.layout.tensors[name].chunks
    for chunk in first.layout.tensors[name].chunks:
        item = Item(name, chunk.offset)
        if chunk in chunks and first.records(item, buffer) == second.records(item, buffer):
            continue
        ours, theirs = first.read(item), _assembled(second, name, chunk)
        if ours is None or ours.shape != theirs.shape:
            raise DamagedArchiveError("a shard has no place, or another shape than recorded")
        count, distance = _distance(ours, theirs)
        differing, largest = differing + count, max(largest, distance)
    return Change(name, f"{differing} elements differ", largest) if differing else None


def _assembled(side: Side, name: str, wanted: Chunk) -> torch.Tensor:
    """The elements of a chunk, from however many shards of the side they lie in."""
    tensor = side.layout.tensors[name]
    if wanted in tensor.chunks:
        value = side.read(Item(name, wanted.offset))
        if value is None:
            raise DamagedArchiveError("a shard has no place")
        return value
    made = torch.zeros(wanted.size, dtype=getattr(torch, tensor.dtype))
    for chunk in tensor.chunks:
        begin = [max(a, b) for a, b in zip(chunk.offset, wanted.offset, strict=True)]
        end = [
            min(a + n, b + m) for a, n, b, m in zip(chunk.offset, chunk.size, wanted.offset, wanted.size, strict=True)
        ]
        if any(a >= b for a, b in zip(begin, end, strict=True)):
            continue
        value = side.read(Item(name, chunk.offset))
        if value is None or value.shape != torch.Size(chunk.size):
            raise DamagedArchiveError("a shard has no place, or another shape than recorded")
        made[_slices(begin, end, wanted.offset)] = value[_slices(begin, end, chunk.offset)]
    return made


def _slices(begin: list[int], end: list[int], origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, origin, strict=True))


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[int, float]:
    """How many elements differ, two NaN being equal, and the largest absolute difference."""
    if ours.dtype.is_floating_point and ours.element_size() == 1:
        ours, theirs = ours.float(), theirs.float()  # few operations know 8 bits
    differs = (ours != theirs) & ~((ours != ours) & (theirs != theirs))
    count = int(differs.sum())
    if not count:
        return 0, 0.0
    left, right = ours[differs], theirs[differs]
    wide = torch.complex128 if ours.dtype.is_complex else torch.float64
    return count, float((left.to(wide) - right.to(wide)).abs().nan_to_num(nan=float("inf")).max())
