"""The collective end of a save: the first of a job that creates its prepared metadata, and every rebuild.

Plans, write results and sections are gathered once; the coordinator makes the layout from them, publishes it, and
answers with plain data. No rank receives the layout of the others: each knows its own part from its own results.
"""

import contextlib
import os
import pickle
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.commit.failures import WriteFailedError
from megatron_ckpt_ext.commit.prepared_file import PreparedFile, distribute_file
from megatron_ckpt_ext.compat.dcp import ERRORS, METADATA_FILE
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.items import item_of, places_of
from megatron_ckpt_ext.metadata.layout import Item, Slice
from megatron_ckpt_ext.metadata.pickled import metadata_body, paused_garbage_collection, with_storage_meta
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.metadata.provenance import with_provenance
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
    results: Callable[[], Sequence[WriteResult]],
    wrapper: Any,
    *,
    drift: str | None,
    fingerprint: Fingerprint,
    side_files: Mapping[str, bytes],
    file: PreparedFile | None,
) -> Together:
    """Publish a save whose layout is made from what all ranks wrote, after all of them could write.

    Called on all ranks: one gather_object and one broadcast of the answer; where a prepared file is written also an
    all_gather_object about who sees it, and one broadcast of the file if a node does not.

    Args:
        storage_writer: of this checkpoint.
        planned: result of planning.
        results: returns what this rank wrote.
        wrapper: torch's ``_DistWrapper`` of the save.
        drift: what this rank found against the layout it followed.
        fingerprint: settings to record.
        side_files: name -> content of what belongs to the checkpoint.
        file: where later jobs find the layout.

    Raises:
        WriteFailedError: on every rank, nothing is published: an item that ranks still hold was written by none,
            because the rank that used to write it has lost it; or a rank could not describe its part; or the layout
            could not be written.
    """
    prepared, report = _report(planned, results, wrapper, drift=drift, fingerprint=fingerprint)
    reports = wrapper.gather_object(report)
    answer: _Answer | None = None
    if reports is not None:
        prepared, answer = _publish(storage_writer, planned, prepared, reports, side_files, file)
    answer = wrapper.broadcast_object(answer)
    if answer.causes or prepared is None:
        raise WriteFailedError(answer.causes)
    if file is not None and answer.file_written:
        distribute_file(file.path, answer.identity, wrapper)
    prepared = replace(prepared, identity=answer.identity, path=None if file is None else file.path)
    return Together(prepared=prepared, drifted=answer.drifted)


def _report(
    planned: PlannedSave,
    results: Callable[[], Sequence[WriteResult]],
    wrapper: Any,
    *,
    drift: str | None,
    fingerprint: Fingerprint,
) -> tuple[PreparedMetadata | None, bytes | str]:
    """Make this rank's part, pickled: what goes wrong must travel, for the peers are on their way to the gather."""
    try:
        written = places_of(results())
        own = Slice(rank=wrapper.rank, locators=written, held=planned.held, lengths=planned.lengths)
        prepared = PreparedMetadata.create(own, fingerprint)
        report = _Report(
            plan=planned.local_plan,
            results=results(),
            section=prepared.section_bytes(),
            unwritten=frozenset(planned.held.keys() - written.keys()),
            drift=drift,
        )
        return prepared, pickle.dumps(report)
    except ERRORS as error:
        return None, f"its part of the layout cannot be described: {type(error).__name__}: {error}"


def _publish(
    storage_writer: Any,
    planned: PlannedSave,
    prepared: PreparedMetadata | None,
    pickled: list[bytes | str],
    side_files: Mapping[str, bytes],
    file: PreparedFile | None,
) -> tuple[PreparedMetadata | None, _Answer]:
    failures = {rank: report for rank, report in enumerate(pickled) if isinstance(report, str)}
    if failures or prepared is None:
        return prepared, _Answer(causes=failures)
    directory = str(storage_writer.checkpoint_id)
    target = os.path.join(directory, METADATA_FILE)
    try:
        with paused_garbage_collection():
            reports: list[_Report] = [pickle.loads(report) for report in pickled if isinstance(report, bytes)]
        body = metadata_body(_layout(planned.planner, reports))
        prepared = replace(prepared, body=body)
        suffix = with_storage_meta(with_provenance(storage_writer.storage_meta(), _how(reports)))
        for name, content in side_files.items():
            write_file(os.path.join(directory, name), [content])
        write_file(target, [body, suffix])
    except ERRORS as error:  # becomes plain data: the peers wait for the answer
        with contextlib.suppress(OSError):
            remove_file(target)
        return prepared, _Answer(causes={prepared.slice.rank: f"{type(error).__name__}: {error}"})
    identity = uuid.uuid4().hex
    sections = [report.section for report in reports]
    written = file is not None and file.write(prepared.file_chunks(suffix, sections, identity=identity))
    return prepared, _Answer(causes={}, identity=identity, drifted=_first_drift(reports), file_written=written)


def _how(reports: list[_Report]) -> str:
    """For ``inspect``: whether there was a layout to follow, and why it was not followed."""
    drifted = _first_drift(reports)
    return "created" if drifted is None else f"rebuilt, rank {drifted[0]}: {drifted[1]}"


def _first_drift(reports: list[_Report]) -> tuple[int, str] | None:
    return next(((rank, report.drift) for rank, report in enumerate(reports) if report.drift is not None), None)


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
