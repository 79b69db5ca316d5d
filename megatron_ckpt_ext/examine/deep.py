"""Reading every item of a checkpoint on all cores, in bounded memory, and comparing checksums and forms."""

import os
import posixpath
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import BinaryIO, NamedTuple

from megatron_ckpt_ext.examine.archive import CHUNK, Content, DamagedArchiveError, content_of
from megatron_ckpt_ext.examine.inert import TensorForm
from megatron_ckpt_ext.publish.storage.interface import storage_of

__all__ = ["Answer", "ItemFault", "Part", "Portion", "contents_differ", "portions", "read_portions"]

_PORTION_BYTES = 256 << 20
_PORTION_ITEMS = 5000


class Part(NamedTuple):
    """An item to read."""

    name: str
    """As an operator can search for it."""
    offset: int
    """First byte in its file."""
    length: int
    """Number of bytes."""
    form: TensorForm | None
    """What the metadata says it is, if it is a tensor."""


class Portion(NamedTuple):
    """Items of one file, for one thread."""

    file: str
    """Full path."""
    parts: tuple[Part, ...]
    """Ascending by offset."""


class ItemFault(NamedTuple):
    """An item that is not what was written."""

    item: str
    """Its name."""
    file: str
    """The file it lies in."""
    problem: str
    """What is wrong."""

    def __str__(self) -> str:
        """Say it in a sentence."""
        return f"item {self.item!r} in {self.file!r} is damaged: {self.problem}"


class Answer(NamedTuple):
    """What was found in a portion."""

    faults: list[ItemFault]
    contents: dict[str, Content]


def portions(directory: str, parts: Iterable[tuple[str, Part]]) -> Iterator[Portion]:
    """Cut the work into pieces that are small enough to be shared out.

    Args:
        directory: of the checkpoint.
        parts: file, relative to the directory, and item.
    """
    files: dict[str, list[Part]] = defaultdict(list)
    for file, part in parts:
        files[posixpath.normpath(file)].append(part)
    for file, of_file in sorted(files.items()):
        path, gathered, size = os.path.join(directory, file), [], 0
        for part in sorted(of_file, key=lambda each: each.offset):
            gathered.append(part)
            size += part.length
            if size >= _PORTION_BYTES or len(gathered) >= _PORTION_ITEMS:
                yield Portion(path, tuple(gathered))
                gathered, size = [], 0
        if gathered:
            yield Portion(path, tuple(gathered))


def read_portions(work: list[Portion]) -> Iterator[tuple[Portion, Answer]]:
    """Read all items, with a thread for each core that this process may use; yield what was found, in any order.

    Reading and checksums leave the interpreter to the others.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="verify") as pool:
        started = {pool.submit(read_portion, portion): portion for portion in work}
        for done in as_completed(started):
            yield started[done], done.result()


def read_portion(portion: Portion) -> Answer:
    """Read the items of a portion."""
    faults: list[ItemFault] = []
    contents: dict[str, Content] = {}
    buffer = bytearray(CHUNK)
    try:
        file = storage_of(portion.file).open(portion.file)
    except OSError as error:
        return Answer([ItemFault(portion.parts[0].name, portion.file, f"it cannot be opened: {error.strerror}")], {})
    with file:
        for part in portion.parts:
            try:
                contents[part.name] = _read(file, part, buffer)
            except (DamagedArchiveError, OSError) as error:
                faults.append(ItemFault(part.name, portion.file, str(error)))
    return Answer(faults, contents)


def _read(file: BinaryIO, part: Part, buffer: bytearray) -> Content:
    content = content_of(file, part.offset, part.length, buffer)
    if part.form is None:
        return content
    found = content.form
    if found is None:
        raise DamagedArchiveError("it holds no tensor")
    if found.size != part.form.size or found.dtype not in (None, part.form.dtype):
        raise DamagedArchiveError(f"it is a {_text(found)}, and .metadata says {_text(part.form)}")
    return content


def _text(form: TensorForm) -> str:
    return f"{form.dtype or 'tensor'} {list(form.size)}"


def contents_differ(left: Mapping[str, Content], right: Mapping[str, Content]) -> Iterator[str]:
    """Name the items of which two checkpoints do not hold the same content."""
    for name in sorted(left.keys() | right.keys()):
        if name not in right or name not in left:
            yield f"item {name!r} is in one of the two only"
        elif left[name].records != right[name].records:
            yield f"item {name!r} has other content"
