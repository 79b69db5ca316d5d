"""What a checkpoint's ``.metadata`` records, as plain data: untrusted bytes end here, in known types or in an error."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_ckpt_ext.compat.dcp import METADATA_FILE, StorageInfo
from megatron_ckpt_ext.compat.msc import object_url
from megatron_ckpt_ext.errors import CkptExtError, PreparedFileError
from megatron_ckpt_ext.metadata.container import Container
from megatron_ckpt_ext.metadata.layout import Item, Locator
from megatron_ckpt_ext.metadata.pickled import load_metadata, with_storage_meta
from megatron_ckpt_ext.metadata.provenance import provenance_of
from megatron_ckpt_ext.publish.coverage import Chunk
from megatron_ckpt_ext.publish.places import Places
from megatron_ckpt_ext.publish.storage.interface import Storage, storage_of
from megatron_ckpt_ext.publish.storage.marker import MARKER_FILE, MARKER_LIMIT, Marker

__all__ = ["RecordedLayout", "RecordedTensor", "UnreadableMetadataError", "read_layout", "read_layout_file"]

_NUMBERS = range(-(1 << 63), 1 << 63)


class UnreadableMetadataError(CkptExtError):
    """There is no ``.metadata``, or none that can be understood; the message is a sentence for a report."""


class RecordedTensor(NamedTuple):
    """Shape of a tensor and of its parts, in elements, and its dtype."""

    size: tuple[int, ...]
    """Shape of the whole tensor."""
    chunks: list[Chunk]
    """The parts that were saved."""
    dtype: str
    """Without ``torch.``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedLayout:
    """The items of a checkpoint and their places. Types are right, everything else is still to be judged."""

    objects: Sequence[str] = ()
    """Names of the non-tensor items."""
    tensors: Mapping[str, RecordedTensor] = MappingProxyType({})
    """Shapes of the tensors by name."""
    places: Mapping[Item, Locator] = MappingProxyType({})
    """Where each item is said to lie."""
    sorted_places: Places | None = None
    """The same as columns, where the numbers allow that."""
    saved_as: str | None = None
    """Path of the directory, as the save named it."""
    provenance: str | None = None
    """How the save got its layout, if it was one of this package."""


def read_layout_file(path: str) -> RecordedLayout:
    """Read a prepared file, or a ``.metadata`` on its own, through the allow-list. No collectives.

    Raises:
        UnreadableMetadataError: missing, damaged or hostile.
    """
    metadata = _load_file(path)
    with _unexpected_forms():
        return _as_plain_data(metadata)


def read_layout(directory: str) -> RecordedLayout:
    """Read the ``.metadata`` of a checkpoint through the allow-list. No collectives.

    Where it was published as an object its marker must be there and agree: for ``msc://`` paths, and for a
    ``.metadata`` that names such a path as its own, wherever it lies now.

    Raises:
        UnreadableMetadataError: missing, damaged, hostile, or not published.
    """
    storage = storage_of(directory)
    try:
        return _read(storage, directory)
    except OSError as error:
        raise UnreadableMetadataError(f"{METADATA_FILE} cannot be read: {error.strerror}") from error


def _read(storage: Storage, directory: str) -> RecordedLayout:
    path = os.path.join(directory, METADATA_FILE)
    if not storage.is_directory(directory):
        raise UnreadableMetadataError(f"{directory!r} is no directory")
    try:
        storage.size(path)
    except FileNotFoundError:
        raise UnreadableMetadataError(f"{METADATA_FILE} is missing: no save was finished in this directory") from None
    content = _judged_by_marker(storage, path)
    metadata = _load(content) if content is not None and not storage.has_renames else _load_file(path)
    with _unexpected_forms():
        if content is None and _is_object(metadata):
            raise UnreadableMetadataError(_unmarked())
        return _as_plain_data(metadata)


@contextmanager
def _unexpected_forms() -> Iterator[None]:
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UnreadableMetadataError(f"{METADATA_FILE} has an unexpected form: {error!r}") from error


def _judged_by_marker(storage: Storage, path: str) -> bytes | None:
    """Return the content of ``.metadata``, with which its marker agrees; ``None`` where there is and need be none."""
    marker_path = os.path.join(os.path.dirname(path), MARKER_FILE)
    try:
        storage.size(marker_path)
        with storage.open(marker_path) as file:
            marker = file.read(MARKER_LIMIT)
    except FileNotFoundError:
        if storage.has_renames:
            return None
        raise UnreadableMetadataError(_unmarked()) from None
    except OSError as error:
        raise UnreadableMetadataError(f"{MARKER_FILE} cannot be read: {error.strerror}") from error
    with storage.open(path) as file:
        content = file.read()
    if problem := Marker.of(METADATA_FILE, content).disagreement(marker):
        raise UnreadableMetadataError(problem)
    return content


def _unmarked() -> str:
    return f"{MARKER_FILE} is missing: {METADATA_FILE} was uploaded, but not published"


def _is_object(metadata: Metadata) -> bool:
    """Whether it was made to be published as an object: a save records its own path."""
    name = getattr(metadata.storage_meta, "checkpoint_id", None)
    return isinstance(name, str | PurePath) and object_url(str(name)) is not None


def _load_file(path: str) -> Metadata:
    """Load a file, which may be a copied prepared file with a trailer."""
    try:
        with Container.open(path) as file:
            content = file.body() + with_storage_meta(None) if file.has_trailer else file.whole_file()
    except (OSError, PreparedFileError) as error:  # its message would advise to remove a prepared file
        raise UnreadableMetadataError(f"{METADATA_FILE} cannot be read, or the trailer behind it is damaged") from error
    return _load(content)


def _load(content: bytes) -> Metadata:
    try:
        return load_metadata(content, origin=METADATA_FILE)
    except PreparedFileError as error:
        raise UnreadableMetadataError(str(error)) from error


def _as_plain_data(metadata: Metadata) -> RecordedLayout:
    """Check types column by column: of a million items one at a time would take as long as unpickling them."""
    entries = metadata.state_dict_metadata
    _check_texts(entries)
    places, sorted_places = _places(metadata.storage_data)
    return RecordedLayout(
        objects=[name for name, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)],
        tensors={name: _tensor(entry) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)},
        places=places,
        sorted_places=sorted_places,
        saved_as=None if (name := getattr(metadata.storage_meta, "checkpoint_id", None)) is None else str(name),
        provenance=provenance_of(metadata.storage_meta),
    )


def _tensor(entry: TensorStorageMetadata) -> RecordedTensor:
    offsets, sizes = [chunk.offsets for chunk in entry.chunks], [chunk.sizes for chunk in entry.chunks]
    _check_shapes([entry.size, *offsets, *sizes])
    return RecordedTensor(
        entry.size, list(map(Chunk._make, zip(offsets, sizes, strict=True))), _dtype(entry.properties.dtype)
    )


def _places(storage_data: Mapping[Any, StorageInfo]) -> tuple[dict[Item, Locator], Places | None]:
    if wrong := {type(index) for index in storage_data} - {MetadataIndex}:  # two such names could mean the same item
        raise TypeError(f"a {wrong.pop().__name__} stands in the place of an item's name")
    infos = storage_data.values()
    names, offsets = [index.fqn for index in storage_data], [index.offset for index in storage_data]
    paths, begins = [info.relative_path for info in infos], [info.offset for info in infos]
    lengths = [info.length for info in infos]
    _check_texts(names)
    _check_texts(paths)
    _check_shapes([offset for offset in offsets if offset is not None])
    _check_numbers(begins)
    _check_numbers(lengths)
    items, places = zip(names, offsets, strict=True), zip(paths, begins, lengths, strict=True)
    found = dict(zip(map(Item._make, items), map(Locator._make, places), strict=True))
    return found, Places.of(paths, begins, lengths)


def _check_texts(values: Iterable[object]) -> None:
    if wrong := {*map(type, values)} - {str}:
        raise TypeError(f"a {wrong.pop().__name__} stands in the place of a name")


def _check_shapes(values: Sequence[Iterable[object]]) -> None:
    if wrong := {*map(type, values)} - {torch.Size, tuple}:
        raise TypeError(f"a {wrong.pop().__name__} stands in the place of a shape")
    _check_numbers([*chain.from_iterable(values)])


def _check_numbers(values: Sequence[Any]) -> None:
    if wrong := {*map(type, values)} - {int}:
        raise TypeError(f"a {wrong.pop().__name__} stands in the place of a 64-bit number")
    if values and not (min(values) in _NUMBERS and max(values) in _NUMBERS):
        raise TypeError("a number has more than 64 bits")


def _dtype(value: object) -> str:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"a {type(value).__name__} stands in the place of a dtype")
    return str(value).removeprefix("torch.")
