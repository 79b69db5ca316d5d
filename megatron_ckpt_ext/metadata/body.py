"""Where the bytes of a whole layout are: what every ``.metadata`` of a job begins with.

They are a quarter of a gigabyte at a million items, and only who publishes needs them, in the background. So a
reference travels, and the bytes are read where they are needed.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ckpt_ext.errors import PreparedFileError

__all__ = ["BodyFile"]

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
    index_crc: int | None = None
    """CRC-32 of the index of sections behind them; ``None`` if this job made them, so nobody else put anything in."""

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
