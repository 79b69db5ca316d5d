"""The places of a million items as columns, so that what is sound is seen without looking at each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

__all__ = ["Places"]

type _Column = numpy.typing.NDArray[numpy.int64]

_SMALL = 1 << 62


@dataclass(frozen=True, slots=True)
class Places:
    """Places sorted by file and offset; those without bytes are left out."""

    files: tuple[str, ...]
    """Names of the files."""
    file: _Column
    """Number of the file."""
    begin: _Column
    """First byte."""
    end: _Column
    """Byte behind the last one."""

    @classmethod
    def of(cls, paths: Sequence[str], offsets: Sequence[int], lengths: Sequence[int]) -> "Places | None":
        """Sort places; ``None`` if a number is negative, or so large that sums could overflow. No I/O."""
        files = tuple(sorted(set(paths)))
        number = {path: place for place, path in enumerate(files)}
        if paths and not (0 <= min(offsets) and max(offsets) < _SMALL and 0 <= min(lengths) and max(lengths) < _SMALL):
            return None
        file = numpy.array([number[path] for path in paths], dtype=numpy.int64)
        begin, length = numpy.array(offsets, dtype=numpy.int64), numpy.array(lengths, dtype=numpy.int64)
        full = numpy.flatnonzero(length)
        order = full[numpy.lexsort((begin[full], file[full]))]
        return cls(files, file[order], begin[order], (begin + length)[order])

    def are_apart_and_inside(self, size_of: Callable[[str], int]) -> bool:
        """Whether all files are there, and their items inside them without overlapping."""
        try:
            sizes = numpy.array([size_of(path) for path in self.files], dtype=numpy.int64)
        except OSError:
            return False
        same_file = self.file[1:] == self.file[:-1]
        apart = self.begin[1:] >= self.end[:-1]
        return bool((apart | ~same_file).all() and (self.end <= sizes[self.file]).all())

    def gaps(self, size_of: Callable[[str], int]) -> Iterator[tuple[str, int, int]]:
        """Yield file, first byte and number of bytes of what no item claims; files that are not there are left out."""
        for number, path in enumerate(self.files):
            first, last = numpy.searchsorted(self.file, [number, number + 1])
            try:
                size = size_of(path)
            except OSError:
                continue
            reached = numpy.maximum.accumulate(numpy.concatenate(([0], self.end[first:last])))
            begins = numpy.concatenate((self.begin[first:last], [size]))
            for at in numpy.flatnonzero(begins > reached):
                yield path, int(reached[at]), int(begins[at] - reached[at])
