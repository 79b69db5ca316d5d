"""Whether the chunks of a tensor cover it exactly once. Pure arithmetic on shapes, no torch.

How many chunks lie over an element is a function on the tensor's grid. Its differences along all dimensions are zero
but at corners of chunks, and the function can be summed up from them again. So every element lies in exactly one chunk
if and only if the corners of the chunks cancel those of the tensor. This costs a few steps a corner, however irregular
the chunks are; comparing chunks in pairs would be quadratic.
"""

from collections import Counter
from collections.abc import Sequence
from operator import add
from typing import NamedTuple

__all__ = ["Chunk", "find_coverage_fault"]

_SMALL = 1 << 62
_CORNERS_PER_CHUNK = 64
"""Bound on the work, for crafted layouts: all corners of a chunk of six dimensions."""

type _Spans = tuple[tuple[int, int], ...]
"""Start and end along some dimensions."""
type _Corners = dict[tuple[tuple[int, ...], _Spans], int]
"""Coordinates in the dimensions done so far and spans in the others, with a count that is not zero."""


class Chunk(NamedTuple):
    """A part of a tensor, in elements."""

    offset: tuple[int, ...]
    """First element."""
    size: tuple[int, ...]
    """Number of elements along each dimension; an empty chunk has a zero."""


def find_coverage_fault(size: Sequence[int], chunks: Sequence[Chunk]) -> str | None:
    """Return why the chunks do not cover a tensor of ``size`` exactly once, or ``None`` if they do. No collectives.

    A zero-size tensor is covered by any number of empty chunks, a scalar by one chunk without dimensions. Chunks of
    more than six dimensions are refused if they are cut irregularly along more than six.

    Returns:
        The first fault: a chunk that leaves the tensor, or else the first element in row-major order that lies in no
        chunk or in several.
    """
    if _is_whole(size, chunks) or _is_grid(size, chunks):
        return None
    for chunk in chunks:
        if not _is_inside(chunk, size):
            return f"its chunk {_text(chunk.size)} at offset {_text(chunk.offset)} leaves the tensor {_text(size)}"
    counts = Counter(map(_spans, chunks))
    counts[_spans(Chunk((0,) * len(size), tuple(size)))] -= 1
    corners: _Corners = {((), spans): count for spans, count in counts.items() if count}
    for _ in size:
        corners = _differences(corners)
        if len(corners) > _CORNERS_PER_CHUNK * (len(chunks) + 1):
            return f"its {len(chunks)} chunks of {len(size)} dimensions are cut too irregularly to be checked"
    if not corners:
        return None
    (element, _), surplus = min(corners.items())
    lies = f"in {surplus + 1} chunks" if surplus > 0 else "in no chunk"
    return f"its element {_text(element)} lies {lies}, of {len(chunks)} chunks of the tensor {_text(size)}"


def _is_whole(size: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Whether there is one chunk, the tensor."""
    return len(chunks) == 1 and tuple(chunks[0].size) == tuple(size) and not any(chunks[0].offset)


def _is_grid(size: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Whether the chunks are all cells of a grid, as shards of real jobs are: a shortcut, much cheaper than corners."""
    dimensions = len(size)
    if len(chunks) < 2 or not size or any(len(part) != dimensions for chunk in chunks for part in chunk):
        return False
    cells, cell = 1, [0] * len(chunks)
    all_starts = zip(*(chunk.offset for chunk in chunks), strict=True)
    all_lengths = zip(*(chunk.size for chunk in chunks), strict=True)
    for extent, starts, lengths in zip(size, all_starts, all_lengths, strict=True):
        if starts.count(0) == lengths.count(extent) == len(chunks) and 0 < extent < _SMALL:
            continue
        if not (0 < extent < _SMALL and min(starts) >= 0 and min(lengths) > 0):
            return False
        spans = sorted(set(zip(starts, map(add, starts, lengths), strict=True)))
        begins = [begin for begin, _ in spans]
        if begins != [0, *(end for _, end in spans[:-1])] or spans[-1][1] != extent:
            return False
        if len(spans) > 1:
            number = {begin: place for place, begin in enumerate(begins)}
            cells *= len(spans)
            cell = [at * len(spans) + number[start] for at, start in zip(cell, starts, strict=True)]
    return cells == len(chunks) == len(set(cell))


def _is_inside(chunk: Chunk, size: Sequence[int]) -> bool:
    return len(chunk.offset) == len(chunk.size) == len(size) and all(
        start >= 0 and length >= 0 and start + length <= extent
        for start, length, extent in zip(chunk.offset, chunk.size, size, strict=True)
    )


def _spans(chunk: Chunk) -> _Spans:
    return tuple((start, start + length) for start, length in zip(chunk.offset, chunk.size, strict=True))


def _differences(corners: _Corners) -> _Corners:
    """Go on to the next dimension: what starts there counts, what ends there counts against it."""
    found: _Corners = {}
    for (done, spans), count in corners.items():
        start, end = spans[0]
        for edge, change in ((start, count), (end, -count)):
            corner = ((*done, edge), spans[1:])
            found[corner] = found.get(corner, 0) + change
    return {corner: count for corner, count in found.items() if count}


def _text(numbers: Sequence[int]) -> str:
    return str(list(numbers))
