"""Where the bytes of a whole layout are: what every ``.metadata`` of a job begins with.

They are a quarter of a gigabyte at a million items, and only who publishes needs them, in the background. So a
reference travels, and the bytes are read where they are needed.
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.pickled import load_metadata, with_storage_meta

__all__ = ["BodyFile", "BodyReader"]

_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyFile:
    """The first bytes of a file, as they were when somebody looked."""

    path: str
    """The file."""
    length: int
    """Number of bytes."""
    crc: int
    """Their CRC-32."""
    made_here: bool = False
    """Whether this job made them, so that nobody else can have put anything in."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes in pieces. No collectives.

        Raises:
            PreparedFileError: at the end at the latest: they cannot be read, or are not what they were.
        """
        left, crc = self.length, 0
        try:
            with open(self.path, "rb") as file:
                while left and (piece := file.read(min(left, _PIECE))):
                    left, crc = left - len(piece), zlib.crc32(piece, crc)
                    yield piece
        except OSError as error:
            raise PreparedFileError(f"the layout in {self.path} cannot be read any more: {error.strerror}") from error
        if left or crc != self.crc:
            raise PreparedFileError(f"the layout in {self.path} is damaged, or no longer the one that was followed")


class BodyReader:
    """Reads bodies for one process; keeps the last that came from outside and was looked through. No collectives."""

    def __init__(self) -> None:
        """Have read nothing."""
        self._kept: tuple[BodyFile, bytes] | None = None

    def read(self, body: bytes | BodyFile) -> Iterable[bytes]:
        """Return the bytes of ``body`` in pieces.

        A file that others can write to is read once and kept: it may be replaced while the job goes on. What is not
        harmless in it is refused, for it would be published with every checkpoint.

        Raises:
            PreparedFileError: now or while the pieces are taken: missing, changed, damaged or hostile.
        """
        if isinstance(body, bytes):
            return (body,)
        if body.made_here:
            return body.pieces()
        if self._kept is None or self._kept[0] != body:
            data = b"".join(body.pieces())
            load_metadata(data + with_storage_meta(None), origin=f"the layout in {body.path}")
            self._kept = body, data
        return (self._kept[1],)
