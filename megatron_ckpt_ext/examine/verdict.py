"""``examine_checkpoint``: is a checkpoint complete, does every byte belong to an item, and is it what was written?"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.examine.archive import Content
from megatron_ckpt_ext.examine.deep import Answer, Part, Portion, contents_differ, portions, read_portions
from megatron_ckpt_ext.examine.inert import TensorForm
from megatron_ckpt_ext.examine.prepared_file import find_section_faults
from megatron_ckpt_ext.examine.unclaimed import find_unclaimed
from megatron_ckpt_ext.metadata.layout import Item
from megatron_ckpt_ext.metadata.pickled import paused_garbage_collection
from megatron_ckpt_ext.publish.completeness import MOST_PROBLEMS, CheckpointReport, judged_checkpoint, judged_file
from megatron_ckpt_ext.publish.recorded import RecordedLayout
from megatron_ckpt_ext.publish.storage.interface import storage_of

__all__ = ["Verdict", "examine_checkpoint"]

_COMMON_FILE = "common.pt"

type Watched = Callable[..., Iterator[tuple[Portion, Answer]]]
"""Passes work on: ``watched(iterator, total=n)``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was found out about one checkpoint."""

    report: CheckpointReport
    """Whether it is complete."""
    findings: tuple[str, ...]
    """What else is wrong, the first sentences."""
    finding_count: int
    """Number of findings, also of those that ``findings`` has no room for."""
    items_read: int
    """Items that were read to the end; 0 unless asked for."""

    @property
    def good(self) -> bool:
        """Whether nothing was found."""
        return self.report.complete and not self.finding_count


def examine_checkpoint(
    path: str | os.PathLike[str],
    *,
    deep: bool = False,
    against: str | os.PathLike[str] | None = None,
    watched: Watched | None = None,
) -> Verdict:
    """Examine a checkpoint. No collectives, no process group; nothing in it is run.

    Args:
        path: its directory, ``msc://profile/prefix``, or a prepared file.
        deep: read every item, on all cores in bounded memory: its archive's checksums must hold, and its dtype and
            shape be those of ``.metadata``. Items that lie beyond their file are not read again.
        against: another checkpoint that must hold the same content, item by item; both are read whole.
        watched: is handed the work as ``watched(iterator, total=n)``, to show progress.

    Raises:
        ConfigurationError: an ``msc://`` path, but the multi-storage client is not installed; a prepared file is to be
            read deeply.
    """
    with paused_garbage_collection():  # until a million items are gone again
        if is_file(os.fspath(path)):
            return _of_prepared_file(os.fspath(path), asked_for_items=deep or against is not None)
        return _of_checkpoint(path, deep, against, watched)


def _of_checkpoint(
    path: str | os.PathLike[str], deep: bool, against: str | os.PathLike[str] | None, watched: Watched | None
) -> Verdict:
    report, layout = judged_checkpoint(path)
    directory = report.path
    findings: list[str] = []
    if layout is None:
        return _verdict(report, [], items_read=0)
    findings += map(str, find_unclaimed(directory, layout))
    contents: dict[str, Content] = {}
    if deep or against is not None:
        faults, contents = _read(directory, layout, watched)
        findings += faults
    if against is not None:
        findings += _against(contents, os.fspath(against), watched)
    return _verdict(report, findings, items_read=len(contents))


def is_file(path: str) -> bool:
    """Whether a path is a prepared file, and not the directory of a checkpoint."""
    return storage_of(path).has_renames and os.path.isfile(path)


def _of_prepared_file(path: str, *, asked_for_items: bool) -> Verdict:
    if asked_for_items:
        raise ConfigurationError(
            f"{path!r} is a prepared file, which holds no items to read: verify it without --deep and --against"
        )
    report, layout = judged_file(path)
    return _verdict(report, [] if layout is None else list(find_section_faults(path, layout)), items_read=0)


def _verdict(report: CheckpointReport, findings: list[str], *, items_read: int) -> Verdict:
    return Verdict(
        report=report,
        findings=tuple(findings[:MOST_PROBLEMS]),
        finding_count=len(findings),
        items_read=items_read,
    )


def _against(contents: dict[str, Content], other: str, watched: Watched | None) -> Iterator[str]:
    report, layout = judged_checkpoint(other)
    if layout is None or not report.complete:
        yield f"{other!r}, to compare with, is not complete: {report.reason}"
        return
    faults, others = _read(report.path, layout, watched)
    yield from (f"{other!r}: {fault}" for fault in faults)
    yield from contents_differ(contents, others)


def _read(directory: str, layout: RecordedLayout, watched: Watched | None) -> tuple[list[str], dict[str, Content]]:
    work = list(portions(directory, _parts(directory, layout)))
    done = read_portions(work)
    faults: list[str] = []
    contents: dict[str, Content] = {}
    for _, answer in watched(done, total=len(work)) if watched else done:
        faults += map(str, answer.faults)
        contents |= answer.contents
    return sorted(faults), contents


def _parts(directory: str, layout: RecordedLayout) -> Iterator[tuple[str, Part]]:
    storage = storage_of(directory)
    size_of = storage.sizes(directory)
    forms = dict(_forms(layout))
    sizes: dict[str, int] = {}
    for item, place in layout.places.items():
        if place.path not in sizes:
            try:
                sizes[place.path] = size_of(place.path)
            except OSError:  # the judge of completeness says so
                sizes[place.path] = 0
        if 0 <= place.offset <= place.offset + place.length <= sizes[place.path]:
            yield place.path, Part(str(item), place.offset, place.length, forms.get(item))
    if storage.exists(common := os.path.join(directory, _COMMON_FILE)):
        yield _COMMON_FILE, Part(_COMMON_FILE, 0, storage.size(common), None)


def _forms(layout: RecordedLayout) -> Iterator[tuple[Item, TensorForm]]:
    for name, tensor in layout.tensors.items():
        for chunk in tensor.chunks:
            yield Item(name, chunk.offset), TensorForm(tensor.dtype, tuple(chunk.size))
