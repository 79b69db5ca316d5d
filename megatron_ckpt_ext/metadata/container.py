"""The prepared file: a pickled ``Metadata`` that any reader understands, and a trailer behind it.

Readers that just unpickle stop at the pickle's end and never reach the trailer. Ours start at the footer, as
with zip or parquet files, so a rank reads its own section and nothing of the others':

    body + suffix     a valid pickle; the body is the part that stays the same from save to save
    sections          one a rank, JSON
    index             one entry a rank: offset, length, CRC-32 of its section
    header            JSON: fingerprint, identity
    footer            fixed size: where everything is, CRC-32 of header, index, body and itself, version, magic

All numbers are little-endian. CRC-32 as in zlib.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.body import BodyFile

__all__ = ["FORMAT_VERSION", "Container", "container_chunks"]

FORMAT_VERSION = 1
"""Version of the trailer; a reader refuses a newer one."""

_MAGIC = b"MCKPTEXT"
_FOOTER = struct.Struct("<QIQIQIIIII8s")
_ENTRY = struct.Struct("<QQI")
_SECTION_LIMIT = 1 << 30
_HEADER_LIMIT = 1 << 20


class _Footer(NamedTuple):
    header_offset: int
    header_length: int
    index_offset: int
    world_size: int
    body_length: int
    header_crc: int
    index_crc: int
    body_crc: int
    footer_crc: int
    version: int
    magic: bytes

    def checksum(self) -> int:
        return zlib.crc32(_FOOTER.pack(*self._replace(footer_crc=0)))


def container_chunks(
    *, body: bytes, suffix: bytes, header: dict[str, Any], sections: Sequence[bytes]
) -> Iterable[bytes]:
    """Yield the bytes of a prepared file in order. No collectives.

    Args:
        body: the pickle of the metadata without its end.
        suffix: the bytes that complete ``body`` to a valid pickle.
        header: JSON data.
        sections: one a rank, in rank order.
    """
    header_bytes = json.dumps(header, sort_keys=True).encode()
    position = len(body) + len(suffix)
    entries = []
    for section in sections:
        entries.append(_ENTRY.pack(position, len(section), zlib.crc32(section)))
        position += len(section)
    index = b"".join(entries)
    footer = _Footer(
        header_offset=position + len(index),
        header_length=len(header_bytes),
        index_offset=position,
        world_size=len(sections),
        body_length=len(body),
        header_crc=zlib.crc32(header_bytes),
        index_crc=zlib.crc32(index),
        body_crc=zlib.crc32(body),
        footer_crc=0,
        version=FORMAT_VERSION,
        magic=_MAGIC,
    )
    footer = footer._replace(footer_crc=footer.checksum())
    yield from (body, suffix, *sections, index, header_bytes, _FOOTER.pack(*footer))


@dataclass(frozen=True, slots=True)
class Container:
    """An open prepared file. Use as a context manager; every read checks length and CRC. No collectives."""

    path: str
    _file: BinaryIO
    _size: int
    _footer: _Footer | None

    @classmethod
    def open(cls, path: str) -> "Container":
        """Open ``path`` and read its footer.

        Raises:
            PreparedFileError: not there, not readable, or a trailer that is damaged or of a newer version.
        """
        try:
            file = open(path, "rb")
        except OSError as error:
            raise PreparedFileError(f"prepared metadata {path!r} cannot be read: {error.strerror}") from error
        try:
            size = os.fstat(file.fileno()).st_size
            return cls(path, file, size, _read_footer(path, file, size))
        except BaseException:
            file.close()
            raise

    def __enter__(self) -> "Container":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    @property
    def has_trailer(self) -> bool:
        """Whether this is a file in our format, and not just a pickled ``Metadata``."""
        return self._footer is not None

    @property
    def world_size(self) -> int:
        """Number of sections: the ranks of the job that made the file."""
        return self._trailer.world_size

    def header(self) -> dict[str, Any]:
        """Return the header's JSON data."""
        footer = self._trailer
        data = self._read(footer.header_offset, footer.header_length, footer.header_crc, "header", _HEADER_LIMIT)
        return self._json(data, "header")

    def section(self, rank: int) -> dict[str, Any]:
        """Return the JSON data of one rank's section: two small reads, whatever the size of the job."""
        position = self._trailer.index_offset + rank * _ENTRY.size
        if not 0 <= rank < self.world_size or position + _ENTRY.size > self._size:
            raise self._damaged(f"index entry of rank {rank}")
        self._file.seek(position)
        offset, length, crc = _ENTRY.unpack(self._file.read(_ENTRY.size))
        what = f"section of rank {rank}"
        return self._json(self._read(offset, length, crc, what, _SECTION_LIMIT), what)

    def body_file(self) -> BodyFile:
        """Tell where the pickle without its end is; reads nothing."""
        footer = self._trailer
        if footer.body_length > self._size:
            raise self._damaged("body")
        return BodyFile(path=self.path, length=footer.body_length, crc=footer.body_crc, index_crc=footer.index_crc)

    def body(self) -> bytes:
        """Return the pickle without its end."""
        footer = self._trailer
        return self._read(0, footer.body_length, footer.body_crc, "body", self._size)

    def whole_file(self) -> bytes:
        """Return every byte of the file."""
        self._file.seek(0)
        return self._file.read()

    @property
    def _trailer(self) -> _Footer:
        if self._footer is None:
            raise self._damaged("trailer")
        return self._footer

    def _read(self, offset: int, length: int, crc: int, what: str, limit: int) -> bytes:
        if length > limit or offset + length > self._size:
            raise self._damaged(what)
        self._file.seek(offset)
        data = self._file.read(length)
        if len(data) != length or zlib.crc32(data) != crc:
            raise self._damaged(what)
        return data

    def _json(self, data: bytes, what: str) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._damaged(what) from error
        if not isinstance(value, dict):
            raise self._damaged(what)
        return value

    def _damaged(self, what: str) -> PreparedFileError:
        return _damaged(self.path, what)


def _read_footer(path: str, file: BinaryIO, size: int) -> _Footer | None:
    if size < _FOOTER.size:
        return None
    file.seek(size - _FOOTER.size)
    footer = _Footer._make(_FOOTER.unpack(file.read(_FOOTER.size)))
    if footer.magic != _MAGIC:
        return None
    if footer.version > FORMAT_VERSION:
        raise PreparedFileError(
            f"prepared metadata {path!r} has format version {footer.version}, newer than {FORMAT_VERSION}, the "
            "newest this release reads: upgrade megatron-ckpt-ext, or let --ckpt-metadata-create make another FILE"
        )
    if footer.footer_crc != footer.checksum():
        raise _damaged(path, "footer")
    return footer


def _damaged(path: str, what: str) -> PreparedFileError:
    return PreparedFileError(
        f"prepared metadata {path!r} is damaged: its {what} cannot be read or fails its checksum. "
        "Remove the file and let --ckpt-metadata-create make it again"
    )
