"""What a checkpoint's ``.metadata`` records, as plain data: untrusted bytes end here, in known types or in an error."""

import errno
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_ckpt_ext.compat.dcp import METADATA_FILE, StorageInfo
from megatron_ckpt_ext.errors import CkptExtError, PreparedFileError
from megatron_ckpt_ext.metadata.container import Container
from megatron_ckpt_ext.metadata.layout import Item, Locator
from megatron_ckpt_ext.metadata.pickled import load_metadata, with_storage_meta
from megatron_ckpt_ext.publish.coverage import Chunk

__all__ = ["RecordedLayout", "RecordedTensor", "UnreadableMetadataError", "file_size", "read_layout"]

_NUMBERS = range(-(1 << 63), 1 << 63)


class UnreadableMetadataError(CkptExtError):
    """There is no ``.metadata``, or none that can be understood; the message is a sentence for a report."""


class RecordedTensor(NamedTuple):
    """Shape of a tensor and of its parts, in elements."""

    size: tuple[int, ...]
    """Shape of the whole tensor."""
    chunks: list[Chunk]
    """The parts that were saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedLayout:
    """The items of a checkpoint and their places. Types are right, everything else is still to be judged."""

    objects: Sequence[str] = ()
    """Names of the non-tensor items."""
    tensors: Mapping[str, RecordedTensor] = MappingProxyType({})
    """Shapes of the tensors by name."""
    places: Mapping[Item, Locator] = MappingProxyType({})
    """Where each item is said to lie."""


def read_layout(directory: str) -> RecordedLayout:
    """Read the ``.metadata`` of a checkpoint through the allow-list. No collectives.

    Raises:
        UnreadableMetadataError: missing, damaged, or hostile.
    """
    metadata = _load(directory)
    try:
        return _as_plain_data(metadata)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UnreadableMetadataError(f"{METADATA_FILE} has an unexpected form: {error!r}") from error


def file_size(directory: str, name: str) -> int:
    """Return the size of a regular file in bytes. No collectives.

    Raises:
        OSError: missing, not readable, no regular file, or no file name; ``strerror`` says which.
    """
    try:
        found = os.stat(os.path.join(directory, name))
    except ValueError as error:
        raise OSError(errno.EINVAL, "Not a file name") from error
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file")
    return found.st_size


def _load(directory: str) -> Metadata:
    if not os.path.isdir(directory):
        raise UnreadableMetadataError(f"{directory!r} is no directory")
    try:
        file_size(directory, METADATA_FILE)
    except FileNotFoundError:
        raise UnreadableMetadataError(f"{METADATA_FILE} is missing: no save was finished in this directory") from None
    except OSError as error:
        raise UnreadableMetadataError(f"{METADATA_FILE} cannot be read: {error.strerror}") from error
    try:
        with Container.open(os.path.join(directory, METADATA_FILE)) as file:
            data = file.body() + with_storage_meta(None) if file.has_trailer else file.whole_file()
    except (OSError, PreparedFileError) as error:  # its message would advise to remove a prepared file
        raise UnreadableMetadataError(f"{METADATA_FILE} cannot be read, or the trailer behind it is damaged") from error
    try:
        return load_metadata(data, origin=METADATA_FILE)
    except PreparedFileError as error:
        raise UnreadableMetadataError(str(error)) from error


def _as_plain_data(metadata: Metadata) -> RecordedLayout:
    entries = {_text(name): entry for name, entry in metadata.state_dict_metadata.items()}
    return RecordedLayout(
        objects=[name for name, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)],
        tensors={name: _tensor(entry) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)},
        places=dict(_place(index, info) for index, info in metadata.storage_data.items()),
    )


def _tensor(entry: TensorStorageMetadata) -> RecordedTensor:
    chunks = [Chunk(_numbers(chunk.offsets), _numbers(chunk.sizes)) for chunk in entry.chunks]
    return RecordedTensor(_numbers(entry.size), chunks)


def _place(index: object, info: StorageInfo) -> tuple[Item, Locator]:
    if not isinstance(index, MetadataIndex):  # two names of other types could mean the same item
        raise TypeError(f"a {type(index).__name__} stands in the place of an item's name")
    item = Item(_text(index.fqn), None if index.offset is None else _numbers(index.offset))
    return item, Locator(_text(info.relative_path), _number(info.offset), _number(info.length))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} stands in the place of a name")
    return value


def _numbers(values: Iterable[object]) -> tuple[int, ...]:
    return tuple([_number(value) for value in values])


def _number(value: object) -> int:
    if not isinstance(value, int) or value not in _NUMBERS:
        raise TypeError(f"a {type(value).__name__} stands in the place of a 64-bit number")
    return value
