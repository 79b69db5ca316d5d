"""``summarize``: what a checkpoint, or a prepared file, holds: by dtype, by file, by item."""

import heapq
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.examine.verdict import is_file
from megatron_ckpt_ext.metadata.container import Container
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.items import OBJECT
from megatron_ckpt_ext.metadata.layout import Item, Locator, Slice, owner_of, workers_per_rank
from megatron_ckpt_ext.metadata.pickled import paused_garbage_collection
from megatron_ckpt_ext.publish.completeness import Kind, judged_checkpoint
from megatron_ckpt_ext.publish.latest import step_number
from megatron_ckpt_ext.publish.recorded import RecordedLayout, UnreadableMetadataError, read_layout_file

__all__ = ["Entry", "Slots", "Summary", "summarize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One item, as it is listed."""

    name: str
    """Item, with the offset of its shard."""
    what: str
    """Dtype and shape of the shard, or ``object``."""
    bytes: int
    """Bytes in the file."""
    file: str
    """File that it lies in, relative to the checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Room of non-tensor items in a prepared file."""

    items: int
    """Items in slots."""
    bytes: int
    """Bytes of all slots."""
    used: int
    """Bytes of the items when the file was made."""
    tightest: tuple[tuple[str, int], ...]
    """Items with the least head room, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What was found."""

    path: str
    """Directory or file."""
    kind: Kind
    """A checkpoint of Megatron's ``torch_dist``, one of torch or ``fsdp_dtensor``, or a prepared file."""
    step: int | None
    """Step that the directory's name tells."""
    complete: bool
    """Whether nothing is missing; of a prepared file, whether it can be read."""
    reason: str
    """Why not."""
    tensors: int = 0
    """Tensors, however many shards each has."""
    shards: int = 0
    """Shards of tensors."""
    objects: int = 0
    """Non-tensor items."""
    bytes: int = 0
    """Bytes of all items."""
    dtypes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Dtype, or ``object`` -> items and bytes."""
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Data file -> items and bytes."""
    ranks: int | None = None
    """Ranks that wrote; ``None`` if file names do not tell."""
    workers: int | None = None
    """Most files of one rank."""
    saved_as: str | None = None
    """Path that the save had, before it was copied or moved."""
    provenance: str | None = None
    """How the save got its layout: created, reused or rebuilt, and why; if it was one of this package."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the job, of a prepared file."""
    slots: Slots | None = None
    """Room of non-tensor items, of a prepared file."""
    largest: tuple[Entry, ...] = ()
    """Largest items, largest first."""
    listed: tuple[Entry, ...] = ()
    """Items that were asked for, by name."""


def summarize(path: str | os.PathLike[str], *, keys: str | None = None, largest: int = 10) -> Summary:
    """Say what a checkpoint or a prepared file holds. No collectives, no process group; nothing in it is run.

    Args:
        path: directory of a checkpoint, ``msc://profile/prefix``, or a prepared file.
        keys: list the items whose name matches this pattern, as in a shell.
        largest: how many of the largest items to name.
    """
    with paused_garbage_collection():  # until a million items are gone again
        return (_of_file if is_file(os.fspath(path)) else _of_checkpoint)(os.fspath(path), keys, largest)


def _of_checkpoint(path: str, keys: str | None, largest: int) -> Summary:
    report, layout = judged_checkpoint(path)
    return Summary(
        path=path,
        kind=report.kind,
        step=step_number(os.path.basename(os.path.normpath(path))),
        complete=report.complete,
        reason=report.reason,
        **_counted(layout or RecordedLayout(), keys, largest),
    )


def _of_file(path: str, keys: str | None, largest: int) -> Summary:
    try:
        layout = read_layout_file(path)
        fingerprint, slots = _prepared_parts(path)
    except (OSError, PreparedFileError, UnreadableMetadataError) as error:
        return Summary(path=path, kind="prepared", step=None, complete=False, reason=str(error))
    return Summary(
        path=path,
        kind="prepared",
        step=None,
        complete=True,
        reason="",
        fingerprint=fingerprint,
        slots=slots,
        **_counted(layout, keys, largest),
    )


def _prepared_parts(path: str) -> tuple[dict[str, Any], Slots | None]:
    with Container.open(path) as file:
        if not file.has_trailer:
            return {}, None
        header = file.header()
        fingerprint = Fingerprint.from_json(header.get("fingerprint") or {}).to_json()
        lengths = [pair for rank in range(file.world_size) for pair in _lengths(Slice.from_json(file.section(rank)))]
    room = sorted((slot - used, name) for name, slot, used in lengths)
    slots = Slots(
        items=len(lengths),
        bytes=sum(slot for _, slot, _ in lengths),
        used=sum(used for _, _, used in lengths),
        tightest=tuple((name, left) for left, name in room[:5]),
    )
    return {name: value for name, value in fingerprint.items() if value is not None}, slots


def _lengths(own: Slice) -> Iterator[tuple[str, int, int]]:
    for item, used in own.lengths.items():
        if item in own.locators:
            yield str(item), own.locators[item].length, used


def _counted(layout: RecordedLayout, keys: str | None, largest: int) -> dict[str, Any]:
    dtype_of = {name: tensor.dtype for name, tensor in layout.tensors.items()}
    lengths = [place.length for place in layout.places.values()]
    dtypes = _totals([dtype_of.get(item.fqn, OBJECT) for item in layout.places], lengths)
    files = _totals([place.path for place in layout.places.values()], lengths)
    owners = {owner_of(name) for name in files} - {None}
    biggest = heapq.nlargest(largest, layout.places.items(), key=lambda pair: pair[1].length)
    return {
        "tensors": len(layout.tensors),
        "shards": sum(len(tensor.chunks) for tensor in layout.tensors.values()),
        "objects": len(layout.objects),
        "bytes": sum(lengths),
        "dtypes": dtypes,
        "files": files,
        "ranks": len(owners) or None,
        "workers": workers_per_rank(files),
        "saved_as": layout.saved_as,
        "provenance": layout.provenance,
        "largest": tuple(_entries(layout, biggest)),
        "listed": () if keys is None else tuple(_entries(layout, _matching(layout, keys))),
    }


def _totals(names: list[str], lengths: list[int]) -> dict[str, tuple[int, int]]:
    """Name -> how often it occurs, and the sum of the lengths beside it; by name."""
    sums: dict[str, int] = dict.fromkeys(sorted(set(names)), 0)
    for name, length in zip(names, lengths, strict=True):
        sums[name] += length
    counts = Counter(names)
    return {name: (counts[name], size) for name, size in sums.items()}


def _matching(layout: RecordedLayout, keys: str) -> list[tuple[Item, Locator]]:
    return sorted(
        (pair for pair in layout.places.items() if fnmatchcase(pair[0].fqn, keys)), key=lambda pair: str(pair[0])
    )


def _entries(layout: RecordedLayout, pairs: Iterable[tuple[Item, Locator]]) -> Iterator[Entry]:
    shapes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for item, place in pairs:
        tensor = layout.tensors.get(item.fqn)
        what = OBJECT
        if tensor is not None and item.offset is not None:
            if item.fqn not in shapes:
                shapes[item.fqn] = {chunk.offset: chunk.size for chunk in tensor.chunks}
            what = f"{tensor.dtype} {list(shapes[item.fqn].get(item.offset, ()))} of {list(tensor.size)}"
        yield Entry(name=str(item), what=what, bytes=place.length, file=place.path)
