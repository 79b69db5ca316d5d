"""Slots: fixed space for non-tensor items, so that a moving length moves nothing behind it.

A non-tensor item is a ``torch.save`` archive, a zip file. It is filled up to its slot with one more stored entry that
every reader of the archive ignores (``torch.load``, DCP, Megatron and NVRx, unchanged). The records are written as in
the zip specification (PKWARE APPNOTE 6.3.10, sections 4.3.7, 4.3.12 and 4.3.16). The archive's zip64 end records
are dropped; an archive that needs them (4 GiB) is left as it is.
"""

import struct
import zlib

__all__ = ["HEAD_ROOM_BYTES", "HEAD_ROOM_LIMIT", "HEAD_ROOM_SHARE", "padded", "slot_size"]

HEAD_ROOM_BYTES = 1024
"""Least head room of a new slot, in bytes."""
HEAD_ROOM_SHARE = 4
"""Head room of a larger item: its size divided by this."""
HEAD_ROOM_LIMIT = 1 << 20
"""Most head room of a new slot, in bytes."""

_NAME = b"/slot"
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_VERSION_NEEDED = 20
_DOS_DATE = 1 << 5 | 1  # 1980-01-01, the earliest there is


def slot_size(length: int) -> int:
    """Return the slot for a new item of ``length`` bytes: the item and its head room."""
    return length + min(max(HEAD_ROOM_BYTES, length // HEAD_ROOM_SHARE), HEAD_ROOM_LIMIT)


def padded(archive: bytes, slot: int) -> bytes | None:
    """Fill a ``torch.save`` archive up to ``slot`` bytes.

    Returns:
        Exactly ``slot`` bytes that load to the same object, or ``None``: longer than the slot, or no zip archive
        that could be filled up.
    """
    if len(archive) == slot:
        return archive
    end = _end_record(archive)
    if len(archive) > slot or end is None:
        return None
    entries, directory_size, directory_offset = end
    directory = archive[directory_offset : directory_offset + directory_size]
    name = _root(archive) + _NAME
    overhead = _LOCAL.size + _CENTRAL.size + 2 * len(name)
    fill = slot - directory_offset - directory_size - _END.size
    if fill < overhead:
        comment = bytes(fill)
        return b"".join(
            (archive[:directory_offset], directory, _end(entries, directory_size, directory_offset, comment))
        )
    content = bytes(fill - overhead)
    local, central = _entry(name, content, directory_offset)
    directory += central
    return b"".join(
        (
            archive[:directory_offset],
            local,
            content,
            directory,
            _end(entries + 1, len(directory), directory_offset + len(local) + len(content)),
        )
    )


def _end_record(archive: bytes) -> tuple[int, int, int] | None:
    """Read entry count, directory size and directory offset, if the archive ends as ``torch.save`` ends one."""
    if len(archive) < _END.size or not archive.startswith(b"PK\x03\x04"):
        return None
    signature, _, _, _, entries, size, offset, comment = _END.unpack(archive[-_END.size :])
    inside = offset + size <= len(archive) - _END.size
    in_zip64_records = entries == 0xFFFF or 0xFFFFFFFF in (size, offset)
    if signature != b"PK\x05\x06" or comment or not inside or in_zip64_records:
        return None
    return entries, size, offset


def _root(archive: bytes) -> bytes:
    """The directory of the archive's entries; torch refuses an entry outside it."""
    name_length = _LOCAL.unpack_from(archive)[-2]
    return archive[_LOCAL.size : _LOCAL.size + name_length].split(b"/")[0]


def _entry(name: bytes, content: bytes, position: int) -> tuple[bytes, bytes]:
    common = (_VERSION_NEEDED, 0, 0, 0, _DOS_DATE, zlib.crc32(content), len(content), len(content), len(name), 0)
    local = _LOCAL.pack(b"PK\x03\x04", *common) + name
    central = _CENTRAL.pack(b"PK\x01\x02", _VERSION_NEEDED, *common, 0, 0, 0, 0, position) + name
    return local, central


def _end(entries: int, size: int, offset: int, comment: bytes = b"") -> bytes:
    return _END.pack(b"PK\x05\x06", 0, 0, entries, entries, size, offset, len(comment)) + comment
