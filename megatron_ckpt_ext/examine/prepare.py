"""A prepared file from a checkpoint that is there, without a job that creates one; and whether one fits a job.

The file is a plain ``Metadata`` as any reader knows it: who holds what cannot be told from a checkpoint, so there is no
section for each rank, and every rank of a job reads it whole.
"""

import os
import posixpath
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_ckpt_ext.compat.dcp import METADATA_FILE, StorageInfo
from megatron_ckpt_ext.errors import ConfigurationError, PreparedFileError
from megatron_ckpt_ext.examine.archive import Window
from megatron_ckpt_ext.metadata.container import Container
from megatron_ckpt_ext.metadata.fingerprint import Difference, Fingerprint
from megatron_ckpt_ext.metadata.items import item_of
from megatron_ckpt_ext.metadata.pickled import load_metadata, metadata_body, with_storage_meta
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata, plain_fingerprint
from megatron_ckpt_ext.metadata.slots import slot_size
from megatron_ckpt_ext.publish.atomic import write_file
from megatron_ckpt_ext.publish.completeness import verify_checkpoint

__all__ = ["PreparedCheckpoint", "fingerprint_differences", "prepare_file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedCheckpoint:
    """A prepared file that was written."""

    path: str
    """The file."""
    fingerprint: Fingerprint
    """What the checkpoint tells of its job: ranks, and files of a rank."""
    items: int
    """Items that have a place."""
    unslotted: tuple[str, ...]
    """Non-tensor items without head room: a save in which one changes its length is rebuilt, once."""


def prepare_file(checkpoint: str, output: str, *, slots: bool = True) -> PreparedCheckpoint:
    """Write a prepared file that later saves of the same job layout follow. No collectives, no process group.

    Args:
        checkpoint: a complete checkpoint on a file system.
        output: the file; replaced if it is there.
        slots: give every non-tensor item head room, by moving what lies behind it in the layout; without it the layout
            is that of the checkpoint to the byte, as other tools that reuse one want it.

    Raises:
        ConfigurationError: the checkpoint is not complete, or the file cannot be written.
        PreparedFileError: its layout cannot be followed.
    """
    report = verify_checkpoint(checkpoint)
    if not report.complete:
        raise ConfigurationError(f"{checkpoint!r} is not complete: {report.reason}. Name a checkpoint that is")
    path = os.path.join(checkpoint, METADATA_FILE)
    with Container.open(path) as file:
        metadata = load_metadata(
            file.body() + with_storage_meta(None) if file.has_trailer else file.whole_file(), origin=path
        )
    bare = dict(_bare_objects(checkpoint, metadata))
    if slots:
        metadata = replace(metadata, storage_data=_with_slots(metadata.storage_data, bare))
        bare = {}
    usable = PreparedMetadata.from_metadata(metadata, 0)
    try:
        write_file(output, [metadata_body(metadata), with_storage_meta(None)])
    except OSError as error:
        raise ConfigurationError(
            f"{output!r} cannot be written: {error.strerror}. Name a file in an existing directory"
        ) from error
    return PreparedCheckpoint(
        path=output,
        fingerprint=usable.fingerprint,
        items=len(metadata.storage_data),
        unslotted=tuple(sorted(index.fqn for index in bare)),
    )


def fingerprint_differences(path: str, expected: Fingerprint) -> list[Difference]:
    """Return what of a job's settings a prepared file does not fit; unknown settings are not compared. No collectives.

    Raises:
        PreparedFileError: it cannot be read.
    """
    with Container.open(path) as file:
        if file.has_trailer:
            known = Fingerprint.from_json(file.header().get("fingerprint") or {})
            known = replace(known, world_size=file.world_size)
        else:
            known = plain_fingerprint(load_metadata(file.whole_file(), origin=f"prepared metadata {path!r}"))
    return known.structural_differences(expected)


def _bare_objects(checkpoint: str, metadata: Metadata) -> Iterator[tuple[MetadataIndex, int]]:
    """Non-tensor items without head room, and their length."""
    files: dict[str, list[tuple[MetadataIndex, StorageInfo]]] = defaultdict(list)
    for index, info in metadata.storage_data.items():
        if item_of(index).offset is None:
            files[info.relative_path].append((index, info))
    for name, placed in files.items():
        with open(os.path.join(checkpoint, name), "rb") as file:
            for index, info in placed:
                try:
                    with zipfile.ZipFile(Window(file, info.offset, info.length)) as archive:
                        has_room = bool(archive.comment) or archive.namelist()[-1].endswith("/slot")
                except (zipfile.BadZipFile, LookupError) as error:
                    raise PreparedFileError(
                        f"item {index.fqn!r} of {checkpoint!r} is damaged: {error}. Verify it with --deep"
                    ) from error
                if not has_room:
                    yield index, info.length


def _with_slots(
    places: Mapping[MetadataIndex, StorageInfo], bare: Mapping[MetadataIndex, int]
) -> dict[MetadataIndex, StorageInfo]:
    """Lengthen what has no head room, and move what lies behind it in the same file."""
    files: dict[str, list[tuple[MetadataIndex, StorageInfo]]] = defaultdict(list)
    for index, info in places.items():
        files[posixpath.normpath(info.relative_path)].append((index, info))
    moved: dict[MetadataIndex, StorageInfo] = {}
    for placed in files.values():
        more = 0
        for index, info in sorted(placed, key=lambda each: (each[1].offset, each[1].length)):
            length = slot_size(bare[index]) if index in bare else info.length
            moved[index] = replace(info, offset=info.offset + more, length=length)
            more += length - info.length
    return {index: moved[index] for index in places}
