"""The marker of a checkpoint in objects: the last one written, small, and telling which ``.metadata`` it is about.

An object has its final name as soon as it is uploaded, so the name alone cannot say that all ranks are done. No save
id is needed: ``.metadata`` holds one, so two saves differ in it and in its checksum.
"""

import json
import zlib
from dataclasses import asdict, dataclass

__all__ = ["MARKER_FILE", "MARKER_LIMIT", "Marker"]

MARKER_FILE = ".complete"
"""Name of the marker, beside ``.metadata``."""
MARKER_LIMIT = 1 << 12
"""Most bytes of a marker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """What the marker says."""

    object: str
    """Name of the object that it is about."""
    length: int
    """Bytes of that object."""
    crc32: int
    """Its CRC-32, as in zlib."""

    @classmethod
    def of(cls, name: str, content: bytes) -> "Marker":
        """Describe an object."""
        return cls(object=name, length=len(content), crc32=zlib.crc32(content))

    def to_bytes(self) -> bytes:
        """Return its JSON."""
        return json.dumps(asdict(self)).encode()

    def disagreement(self, written: bytes) -> str | None:
        """Return how the marker that was found differs from this one, the one that should be there, or ``None``.

        Args:
            written: content of the marker's file, untrusted.
        """
        try:
            found = json.loads(written)
        except (RecursionError, ValueError):
            return f"{MARKER_FILE} is no marker: it is no JSON"
        if found == asdict(self):
            return None
        return f"{MARKER_FILE} tells of another {self.object} than this one of {self.length} bytes: {str(found)[:200]}"
