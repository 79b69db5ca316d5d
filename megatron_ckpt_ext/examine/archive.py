"""One item of a checkpoint, a ``torch.save`` archive inside a data file: is every byte of it what was written?

The archive is a zip file (PKWARE APPNOTE 6.3.10) whose entries are stored, each with the CRC-32 of its content. No
reader of checkpoints compares them.
"""

import io
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from megatron_ckpt_ext.examine.inert import TensorForm, tensor_form

__all__ = ["CHUNK", "Content", "DamagedArchiveError", "Window", "content_of"]

CHUNK = 4 << 20
"""Bytes that are read at once."""
_LOCAL_HEADER = 30
_PICKLE_LIMIT = 1 << 30
_WITHOUT_CONTENT = ("slot", "serialization_id", "version", "byteorder", ".format_version", ".storage_alignment")
"""Entries that two archives of the same content may differ in."""


class DamagedArchiveError(ValueError):
    """Bytes that are not what ``torch.save`` wrote; a sentence without the item's name."""


class Content(NamedTuple):
    """What is in an archive."""

    form: TensorForm | None
    """Of the tensor that it holds; ``None`` for other objects."""
    records: tuple[tuple[str, int, int], ...]
    """Name inside the archive, CRC-32 and bytes of each entry that holds content, in order."""


class Window(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        """Always."""
        return True

    def readable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of a file."""
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        """As of a file."""
        return self._at

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]  # any buffer, as for files
        """Read what is left, as much as fits."""
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]  # of every binary file
        self._at += count
        return int(count)


def content_of(file: BinaryIO, offset: int, length: int, buffer: bytearray) -> Content:
    """Read an archive to its end and compare every checksum. No collectives; nothing in it is run.

    Args:
        file: open for reading.
        offset: of the archive, in bytes.
        length: of the archive, in bytes.
        buffer: is overwritten; memory beyond it is that of the pickle in the archive.

    Raises:
        DamagedArchiveError: a checksum differs, or it is no such archive.
        OSError: it cannot be read.
    """
    window = Window(file, offset, length)
    try:
        with zipfile.ZipFile(window) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
            _refuse_gaps(window, entries, archive.start_dir)
            for entry in entries:
                _compare_checksum(window, entry, buffer)
            form = _form(archive, entries)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, UnicodeError, OverflowError) as error:
        raise DamagedArchiveError(f"it is no archive of torch.save: {error}") from error
    records = tuple(_records(entries))
    if not records:
        raise DamagedArchiveError("its archive is empty")
    return Content(form, records)


def _refuse_gaps(window: Window, entries: list[zipfile.ZipInfo], end: int) -> None:
    """Every byte up to the directory belongs to an entry: a header that leads elsewhere hides what is not compared."""
    reached = 0
    for entry, following in zip(entries, [each.header_offset for each in entries[1:]] + [end], strict=True):
        if entry.header_offset != reached:
            raise DamagedArchiveError(
                f"its entry {entry.filename!r} begins at byte {entry.header_offset}, not {reached}"
            )
        begin = _data_offset(window, entry)
        if begin + entry.compress_size > following:
            raise DamagedArchiveError(f"its entry {entry.filename!r} reaches into the next one")
        reached = following


def _data_offset(window: Window, entry: zipfile.ZipInfo) -> int:
    window.seek(entry.header_offset)
    header = window.read(_LOCAL_HEADER) or b""
    if len(header) < _LOCAL_HEADER or not header.startswith(b"PK\x03\x04"):
        raise DamagedArchiveError(f"its entry {entry.filename!r} has no header")
    name_length, extra_length = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    if window.read(name_length) != entry.orig_filename.encode():
        raise DamagedArchiveError(f"its entry {entry.filename!r} has another name in front of its content")
    return entry.header_offset + _LOCAL_HEADER + name_length + extra_length


def _compare_checksum(window: Window, entry: zipfile.ZipInfo, buffer: bytearray) -> None:
    if entry.compress_type != zipfile.ZIP_STORED:
        raise DamagedArchiveError(f"its entry {entry.filename!r} is compressed, which torch.save does not do")
    checksum = 0
    for part in _stored(window, _data_offset(window, entry), entry.file_size, buffer):
        checksum = zlib.crc32(part, checksum)
    if checksum != entry.CRC:
        raise DamagedArchiveError(
            f"its entry {entry.filename!r} has CRC-32 {checksum:08x}, and {entry.CRC:08x} was written"
        )


def _stored(window: Window, offset: int, length: int, buffer: bytearray) -> Iterator[memoryview]:
    window.seek(offset)
    view = memoryview(buffer)
    while length:
        count = window.readinto(view[: min(length, len(view))])
        if not count:
            raise DamagedArchiveError(f"it ends {length} bytes too early")
        length -= count
        yield view[:count]


def _form(archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo]) -> TensorForm | None:
    pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > _PICKLE_LIMIT:
        raise DamagedArchiveError(f"its archive has {len(pickles)} entries data.pkl")
    try:
        return tensor_form(archive.read(pickles[0]))
    except ValueError as error:
        raise DamagedArchiveError(f"its data.pkl is no pickle: {error}") from error


def _records(entries: list[zipfile.ZipInfo]) -> Iterator[tuple[str, int, int]]:
    for entry in entries:
        name = entry.filename.partition("/")[2]
        if name.rpartition("/")[2] not in _WITHOUT_CONTENT:
            yield name, entry.CRC, entry.file_size
