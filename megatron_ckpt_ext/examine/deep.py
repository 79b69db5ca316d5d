"""Reading every item of a checkpoint on all cores, in bounded memory, and comparing checksums and forms.

The work is done in processes of their own, which import neither torch nor Megatron: what they are given and what they
answer is plain data.
"""

import multiprocessing
import os
import posixpath
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import BinaryIO, NamedTuple

from megatron_ckpt_ext.examine.archive import CHUNK, Content, DamagedArchiveError, content_of
from megatron_ckpt_ext.examine.inert import TensorForm
from megatron_ckpt_ext.publish.storage.interface import storage_of

__all__ = ["ItemFault", "Part", "Portion", "contents_differ", "portions", "read_portions"]

_PORTION_BYTES = 256 << 20
_WORTH_A_PROCESS = 128 << 20
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
    """Items of one file, for one process."""

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
    """What one process found."""

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


def read_portions(work: list[Portion], *, processes: int | None = None) -> Iterator[tuple[Portion, Answer]]:
    """Read all items; yield what was found, in any order. Starts processes and ends them.

    Args:
        work: of ``portions``.
        processes: how many; by default one for each core that this process may use.
    """
    size = sum(part.length for portion in work for part in portion.parts)
    count = min(processes or len(os.sched_getaffinity(0)), len(work), 1 + size // _WORTH_A_PROCESS)
    if count <= 1:
        yield from ((portion, read_portion(portion)) for portion in work)
        return
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = {pool.submit(read_portion, portion): portion for portion in work}
        for done in as_completed(started):
            portion = started[done]
            try:
                yield portion, done.result()
            except BrokenProcessPool:
                died = ItemFault(portion.parts[0].name, portion.file, "the process that read it, or another one, died")
                yield portion, Answer([died], {})


def read_portion(portion: Portion) -> Answer:
    """Read the items of a portion, in this process."""
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
