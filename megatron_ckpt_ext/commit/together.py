"""The collective end of a save: the first of a job that creates its prepared metadata, and every rebuild.

Plans, write results and sections are gathered once; the coordinator makes the layout from them, publishes it, and
answers with plain data. No rank receives the layout of the others: each knows its own part from its own results.
"""

import contextlib
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.commit.failures import WriteFailedError
from megatron_ckpt_ext.commit.prepared_file import PreparedFile, distribute_file
from megatron_ckpt_ext.commit.results import written_items
from megatron_ckpt_ext.compat.dcp import METADATA_FILE
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.items import item_of
from megatron_ckpt_ext.metadata.layout import Item, Slice
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.async_plan import PlannedSave
from megatron_ckpt_ext.publish.atomic import remove_file, write_file

__all__ = ["Together", "commit_together"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """The outcome on every rank."""

    prepared: PreparedMetadata
    """The new layout, this rank's part; the bytes on the coordinator only."""
    drifted: tuple[int, str] | None
    """Lowest rank that reported drift, and its sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """What one rank sends to the coordinator."""

    plan: SavePlan
    results: Sequence[WriteResult]
    section: bytes
    unwritten: frozenset[Item]
    drift: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What the coordinator sends back: plain data."""

    causes: dict[int, str]
    identity: str = ""
    drifted: tuple[int, str] | None = None
    file_written: bool = False


def commit_together(
    storage_writer: Any,
    planned: PlannedSave,
    results: Sequence[WriteResult],
    wrapper: Any,
    *,
    drift: str | None,
    fingerprint: Fingerprint,
    file: PreparedFile | None,
) -> Together:
    """Publish a save whose layout is made from what all ranks wrote, after all of them could write.

    Called on all ranks: one gather_object and one broadcast of the answer; where a prepared file is written also an
    all_gather_object about who sees it, and one broadcast of the file if a node does not.

    Args:
        storage_writer: of this checkpoint.
        planned: result of planning.
        results: what this rank wrote.
        wrapper: torch's ``_DistWrapper`` of the save.
        drift: what this rank found against the layout it followed.
        fingerprint: settings to record.
        file: where later jobs find the layout.

    Raises:
        WriteFailedError: on every rank, nothing is published: an item that ranks still hold was written by none,
            because the rank that used to write it has lost it; or the layout could not be written.
    """
    written = written_items(results)
    own = Slice(rank=wrapper.rank, locators=written, held=planned.held, lengths=planned.lengths)
    prepared = PreparedMetadata.create(own, fingerprint)
    report = _Report(
        plan=planned.local_plan,
        results=results,
        section=prepared.section_bytes(),
        unwritten=frozenset(planned.held.keys() - written.keys()),
        drift=drift,
    )
    reports = wrapper.gather_object(report)
    answer: _Answer | None = None
    if reports is not None:
        prepared, answer = _publish(storage_writer, planned, prepared, reports, file)
    answer = wrapper.broadcast_object(answer)
    if answer.causes:
        raise WriteFailedError(answer.causes)
    if file is not None and answer.file_written:
        distribute_file(file.path, answer.identity, wrapper)
    prepared = replace(prepared, identity=answer.identity, path=None if file is None else file.path)
    return Together(prepared=prepared, drifted=answer.drifted)


def _publish(
    storage_writer: Any,
    planned: PlannedSave,
    prepared: PreparedMetadata,
    reports: list[_Report],
    file: PreparedFile | None,
) -> tuple[PreparedMetadata, _Answer]:
    target = os.path.join(str(storage_writer.checkpoint_id), METADATA_FILE)
    try:
        prepared = prepared.with_layout(_layout(planned.planner, reports))
        storage_meta = storage_writer.storage_meta()
        write_file(target, prepared.metadata_chunks(storage_meta))
    except Exception as error:  # becomes plain data: the peers wait for the answer
        with contextlib.suppress(OSError):
            remove_file(target)
        return prepared, _Answer(causes={prepared.slice.rank: f"{type(error).__name__}: {error}"})
    identity = uuid.uuid4().hex
    sections = [report.section for report in reports]
    written = file is not None and file.write(prepared.file_chunks(storage_meta, sections, identity=identity))
    drifted = next(((rank, report.drift) for rank, report in enumerate(reports) if report.drift is not None), None)
    return prepared, _Answer(causes={}, identity=identity, drifted=drifted, file_written=written)


def _layout(planner: Any, reports: list[_Report]) -> Metadata:
    # torch's planner keeps one of several writers of an item: a shard that moved is written by its old and new owner.
    _, metadata = planner.create_global_plan([report.plan for report in reports])
    locators = {result.index: result.storage_data for report in reports for result in report.results}
    held = {item: rank for rank, report in enumerate(reports) for item in report.unwritten}
    lost = held.keys() - {item_of(index) for index in locators}
    if lost:
        item = min(lost, key=str)
        raise ValueError(
            f"rank {held[item]} still holds {item}, but nobody wrote it: the rank that used to write it has lost it. "
            "The next save is planned together"
        )
    metadata.storage_data = locators
    return metadata  # type: ignore[no-any-return]
