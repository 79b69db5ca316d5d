"""``verify_checkpoint``: the one judge of whether a checkpoint is complete.

Resume, retention and tools ask it and nobody else. It works offline and reads no tensors: only ``.metadata``, the
small side files, and the size of each data file. The rules about places get sizes from a function they are given, so
they hold for any storage.
"""

import json
import os
import posixpath
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.layout import Item, Locator, checked_locator
from megatron_ckpt_ext.metadata.pickled import paused_garbage_collection
from megatron_ckpt_ext.publish.coverage import find_coverage_fault
from megatron_ckpt_ext.publish.recorded import RecordedLayout, UnreadableMetadataError, read_layout, read_layout_file
from megatron_ckpt_ext.publish.storage.interface import Storage, storage_of

__all__ = ["MOST_PROBLEMS", "CheckpointReport", "Kind", "judged_checkpoint", "judged_file", "verify_checkpoint"]

MOST_PROBLEMS = 20
"""A report names this many problems and counts the others."""

_CONFIG_FILE = "metadata.json"
_CONFIG_LIMIT = 1 << 20
_COMMON_FILE = "common.pt"
_COMMON_STATE = "common_state/shard_"
_MEGATRON_OBJECT = re.compile(r"/shard_[0-9.]*_[0-9.]*\Z")
"""Megatron's name of an object: ``{key}/shard_{offset}_{shape}``, numbers joined by dots."""

type Kind = Literal["torch_dist", "dcp", "prepared"]
"""``torch_dist`` is Megatron's format; ``dcp`` is plain torch and ``fsdp_dtensor``, which need no side files; a
``prepared`` file is the layout alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReport:
    """What ``verify_checkpoint`` found."""

    path: str
    """The directory."""
    kind: Kind
    """The format, which decides about side files."""
    problems: tuple[str, ...]
    """The first problems, each a sentence that names file or item and numbers."""
    problem_count: int
    """Number of problems, also of those that ``problems`` has no room for."""
    items: int
    """Number of items that have a place in a file: chunks of tensors, and objects."""
    bytes: int
    """Bytes of these items."""
    files: int
    """Number of data files that these items lie in."""

    @property
    def complete(self) -> bool:
        """Whether nothing is missing, as far as can be told without reading tensors."""
        return self.problem_count == 0

    @property
    def reason(self) -> str:
        """The first problem and the number of others; empty if complete."""
        others = f" (and {self.problem_count - 1} more)" if self.problem_count > 1 else ""
        return "".join(self.problems[:1]) + others


def verify_checkpoint(path: str | os.PathLike[str]) -> CheckpointReport:
    """Judge whether the checkpoint in the directory ``path`` is complete. No collectives, no process group.

    Complete means: ``.metadata`` is readable; each item has a place in a file, and each place an item; the places lie
    inside files of the directory and do not overlap; the chunks of each tensor cover it exactly once; and the side
    files of the format are there, for ``torch_dist`` ``metadata.json`` and, before Megatron 0.19, ``common.pt``. In
    object storage the marker of ``.metadata`` must be there, too.

    Whatever is in the directory, or if there is none: no foreign code is run, and the answer is a report.

    Args:
        path: a directory, or ``msc://profile/prefix``.

    Raises:
        ConfigurationError: an ``msc://`` path, but the multi-storage client is not installed.
    """
    with paused_garbage_collection():  # until a million items are gone again
        return judged_checkpoint(path)[0]


def judged_checkpoint(path: str | os.PathLike[str]) -> tuple[CheckpointReport, RecordedLayout | None]:
    """Judge as ``verify_checkpoint``, and return what ``.metadata`` records as well; ``None`` if it cannot be read."""
    with paused_garbage_collection():
        return _judged(storage_of(os.fspath(path)), os.fspath(path))


def _judged(storage: Storage, path: str) -> tuple[CheckpointReport, RecordedLayout | None]:
    directory = storage.directory(path)
    try:
        layout = read_layout(directory)
        problems = _layout_problems(layout, storage.sizes(directory))
    except (OSError, UnreadableMetadataError) as error:
        layout = None
        problems = iter((str(error),))
    kind = _kind(storage, directory, layout)
    if kind == "torch_dist":
        side_files = _config_problems(storage, directory), _common_state_problems(storage, directory, layout)
        problems = chain(problems, *side_files)
    return _report(directory, kind, layout or RecordedLayout(), problems), layout


def judged_file(path: str) -> tuple[CheckpointReport, RecordedLayout | None]:
    """Judge a prepared file, or a ``.metadata`` on its own: is its layout readable, and whole? No collectives."""
    try:
        layout = read_layout_file(path)
    except (OSError, UnreadableMetadataError) as error:
        return _report(path, "prepared", RecordedLayout(), iter((str(error),))), None
    reaches: dict[str, int] = defaultdict(int)  # there are no files yet: each is as long as its items need
    for place in layout.places.values():
        name = posixpath.normpath(place.path)
        reaches[name] = max(reaches[name], place.offset + place.length)
    return _report(path, "prepared", layout, _layout_problems(layout, reaches.__getitem__)), layout


def _report(directory: str, kind: Kind, layout: RecordedLayout, problems: Iterator[str]) -> CheckpointReport:
    first = tuple(islice(problems, MOST_PROBLEMS))
    return CheckpointReport(
        path=directory,
        kind=kind,
        problems=first,
        problem_count=len(first) + sum(1 for _ in problems),
        items=len(layout.places),
        bytes=sum(place.length for place in layout.places.values()),
        files=len({place.path for place in layout.places.values()}),
    )


def _layout_problems(layout: RecordedLayout, size_of: Callable[[str], int]) -> Iterator[str]:
    yield from _unpaired(layout)
    for name, (size, chunks, _) in layout.tensors.items():
        if fault := find_coverage_fault(size, chunks):
            yield f"tensor {name!r} is not covered exactly once: {fault}"
    places = layout.sorted_places
    if places is not None and all(map(_may_be_named, places.files)) and places.are_apart_and_inside(size_of):
        return
    files: dict[str, list[tuple[Locator, Item]]] = defaultdict(list)
    for item, place in layout.places.items():
        try:
            checked_locator(*place)
        except PreparedFileError:
            yield f"{_named(item)} has no place inside: {place.path!r}, offset {place.offset}, length {place.length}"
        else:
            files[posixpath.normpath(place.path)].append((place, item))
    for file, placed in sorted(files.items()):
        yield from _file_problems(file, sorted(placed, key=lambda pair: pair[0][1:]), size_of)


def _may_be_named(path: str) -> bool:
    """Whether a file lies inside the directory, and has no other name: two names could hide an overlap."""
    try:
        checked_locator(path, 0, 0)
    except PreparedFileError:
        return False
    return posixpath.normpath(path) == path


def _unpaired(layout: RecordedLayout) -> Iterator[str]:
    named = len(layout.objects) + sum(len(tensor.chunks) for tensor in layout.tensors.values())
    if named == len(layout.places) and _all_placed(layout):
        return  # of as many names none is missing, so none is twice, and none is too many
    items = {Item(name, None) for name in layout.objects}
    items.update(Item(name, chunk.offset) for name, (_, chunks, _) in layout.tensors.items() for chunk in chunks)
    yield from (f"{_named(item)} has no place in any file" for item in sorted(items - layout.places.keys(), key=str))
    for item in sorted(layout.places.keys() - items, key=str):
        yield f"{layout.places[item]} is the place of {_named(item)}, which the checkpoint does not have"


def _all_placed(layout: RecordedLayout) -> bool:
    """Whether every item has a place, and no chunk is named twice."""
    places: Mapping[Any, Locator] = layout.places  # a plain tuple is the key that the item of that name is
    if not all((name, None) in places for name in layout.objects):
        return False
    for name, tensor in layout.tensors.items():
        keys = {(name, chunk.offset) for chunk in tensor.chunks}
        if len(keys) != len(tensor.chunks) or keys.difference(places):  # which hashes each key once
            return False
    return True


def _file_problems(file: str, placed: list[tuple[Locator, Item]], size_of: Callable[[str], int]) -> Iterator[str]:
    """Judge one file; ``placed`` is sorted by offset."""
    try:
        size = size_of(file)
    except OSError as error:
        yield f"file {file!r}, in which {len(placed)} items lie, cannot be read: {error.strerror}"
    else:
        beyond = [(place.offset + place.length, item) for place, item in placed if place.offset + place.length > size]
        if beyond:
            end, item = max(beyond, key=lambda pair: pair[0])
            yield f"file {file!r} has {size} bytes, but {len(beyond)} items reach beyond, {_named(item)} to byte {end}"
    reached, owner = 0, None
    for place, item in placed:
        if place.length and place.offset < reached and owner is not None:
            yield f"in {file!r} {_named(item)} begins at byte {place.offset}, but {_named(owner)} ends at {reached}"
        if place.offset + place.length > reached:
            reached, owner = place.offset + place.length, item


def _kind(storage: Storage, directory: str, layout: RecordedLayout | None) -> Kind:
    """Tell Megatron's format by what Megatron alone writes; one of its files may be what is missing."""
    if any(storage.exists(os.path.join(directory, name)) for name in (_CONFIG_FILE, _COMMON_FILE)):
        return "torch_dist"
    names = layout.objects if layout else []
    return "torch_dist" if any(_MEGATRON_OBJECT.search(name) for name in names) else "dcp"


def _config_problems(storage: Storage, directory: str) -> Iterator[str]:
    path = os.path.join(directory, _CONFIG_FILE)
    try:
        storage.size(path)
        with storage.open(path) as file:
            config = json.loads(file.read(_CONFIG_LIMIT))
    except OSError as error:
        yield f"{_CONFIG_FILE}, which Megatron needs beside .metadata, cannot be read: {error.strerror}"
        return
    except (RecursionError, ValueError) as error:
        yield f"{_CONFIG_FILE} is no JSON: {error}"
        return
    backend = config.get("sharded_backend") if isinstance(config, dict) else config
    if backend != "torch_dist":
        yield f"{_CONFIG_FILE} names the format {backend!r}, not 'torch_dist'"


def _common_state_problems(storage: Storage, directory: str, layout: RecordedLayout | None) -> Iterator[str]:
    """Megatron keeps its common state in an item since 0.19, before in a file of its own."""
    if layout is None or any(name.startswith(_COMMON_STATE) for name in layout.objects):
        return
    path = os.path.join(directory, _COMMON_FILE)
    try:
        storage.size(path)
        with storage.open(path) as file:
            is_archive = zipfile.is_zipfile(file)
    except OSError as error:
        yield f"{_COMMON_FILE}, needed since there is no item 'common_state', cannot be read: {error.strerror}"
        return
    if not is_archive:
        yield f"{_COMMON_FILE} is cut off or damaged: it has no end of a torch.save archive"


def _named(item: Item) -> str:
    return f"item {str(item)!r}"
