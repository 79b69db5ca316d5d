"""Bytes of data files that no item claims: what an older save left, or a writer that did not write what it said."""

import posixpath
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ckpt_ext.metadata.layout import Locator
from megatron_ckpt_ext.publish.recorded import RecordedLayout
from megatron_ckpt_ext.publish.storage.interface import storage_of

__all__ = ["Unclaimed", "find_unclaimed"]

_DATA_FILE = ".distcp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unclaimed:
    """A run of bytes in a data file that belongs to no item. Slots are claimed whole, head room included."""

    file: str
    """Relative to the checkpoint's directory."""
    offset: int
    """First byte."""
    length: int
    """Number of bytes."""

    def __str__(self) -> str:
        """Say it in a sentence."""
        return f"{self.length} bytes of {self.file!r}, from byte {self.offset}, belong to no item"


def find_unclaimed(directory: str, layout: RecordedLayout) -> Iterator[Unclaimed]:
    """Find bytes that no item claims, in files with items and in data files without any. No collectives.

    Args:
        directory: of the checkpoint.
        layout: what its ``.metadata`` records.
    """
    storage = storage_of(directory)
    size_of = storage.sizes(directory)
    placed: dict[str, list[Locator]] = defaultdict(list)
    for place in layout.places.values():
        placed[posixpath.normpath(place.path)].append(place)
    others = {name for name in storage.names(directory) if name.endswith(_DATA_FILE)} - placed.keys()
    for file in sorted(placed.keys() | others):
        try:
            size = size_of(file)
        except OSError:  # the judge of completeness says so
            continue
        yield from _gaps(file, sorted(placed.get(file, ()), key=lambda place: place.offset), size)


def _gaps(file: str, places: list[Locator], size: int) -> Iterator[Unclaimed]:
    reached = 0
    for place in places:
        if place.offset > reached:
            yield Unclaimed(file=file, offset=reached, length=place.offset - reached)
        reached = max(reached, place.offset + place.length)
    if size > reached:
        yield Unclaimed(file=file, offset=reached, length=size - reached)
