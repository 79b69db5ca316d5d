"""Whether the chunks of a tensor cover it exactly once. Pure arithmetic on shapes, no torch.

How many chunks lie over an element is a function on the tensor's grid. Its differences along all dimensions are zero
but at corners of chunks, and the function can be summed up from them again. So every element lies in exactly one chunk
if and only if the corners of the chunks cancel those of the tensor. This costs a few steps a corner, however irregular
the chunks are; comparing chunks in pairs would be quadratic.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Chunk", "find_coverage_fault"]

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
