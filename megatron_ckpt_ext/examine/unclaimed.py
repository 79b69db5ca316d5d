"""Bytes of data files that no item claims: what an older save left, or a writer that did not write what it said."""

import contextlib
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

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
    if (places := layout.sorted_places) is not None:
        yield from (Unclaimed(file=file, offset=at, length=length) for file, at, length in places.gaps(size_of))
    named = {posixpath.normpath(path) for path in (() if places is None else places.files)}
    for file in sorted({name for name in storage.names(directory) if name.endswith(_DATA_FILE)} - named):
        with contextlib.suppress(OSError):
            if size := size_of(file):
                yield Unclaimed(file=file, offset=0, length=size)
