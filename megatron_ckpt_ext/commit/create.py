"""Finalizing the first save of a job that makes its prepared metadata: the collective path, once."""

import logging
import os
import uuid
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.commit.distribute import distribute_file
from megatron_ckpt_ext.commit.failures import WriteFailedError
from megatron_ckpt_ext.commit.results import retrieve_results, written_items
from megatron_ckpt_ext.compat.dcp import METADATA_FILE
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.items import describe_metadata, item_of
from megatron_ckpt_ext.metadata.layout import Slice
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.async_plan import PlannedSave
from megatron_ckpt_ext.publish.atomic import write_file

__all__ = ["finalize_create"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """What one rank sends to the coordinator."""

    results: list[WriteResult]
    section: bytes
    failure: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What the coordinator sends back: plain data."""

    causes: dict[int, str]
    identity: str


def finalize_create(
    storage_writer: Any, planned: PlannedSave, wrapper: Any, *, path: str, fingerprint: Fingerprint
) -> PreparedMetadata:
    """Publish a save that was planned together and make the prepared file ``path`` from it.

    Called on all ranks: one gather_object of the write results, one broadcast of the answer, one
    all_gather_object about who sees the file, and one broadcast of the file if a node does not.
    No rank receives the layout of the others: each knows its own part from its own results.

    Raises:
        WriteFailedError: a rank could not write; on every rank, nothing is published.
    """
    results, failure = retrieve_results(storage_writer)
    own = Slice(rank=wrapper.rank, locators=written_items(results), held=planned.held)
    prepared = PreparedMetadata.create(own, fingerprint)
    report = _Report(results=list(results), section=prepared.section_bytes(), failure=failure)
    reports = wrapper.gather_object(report)
    answer: _Answer | None = None
    if reports is not None:
        prepared, answer = _publish(storage_writer, planned, own, fingerprint, reports, path)
    answer = wrapper.broadcast_object(answer)
    if answer.causes:
        raise WriteFailedError(answer.causes)
    distribute_file(path, answer.identity, wrapper)
    return prepared


def _publish(
    storage_writer: Any,
    planned: PlannedSave,
    own: Slice,
    fingerprint: Fingerprint,
    reports: list[_Report],
    path: str,
) -> tuple[PreparedMetadata, _Answer]:
    identity = uuid.uuid4().hex
    prepared = PreparedMetadata.create(own, fingerprint)
    causes = {rank: report.failure for rank, report in enumerate(reports) if report.failure is not None}
    if not causes:
        try:
            metadata = _complete_metadata(planned, reports)
            prepared = PreparedMetadata.create(own, fingerprint, metadata=metadata)
            storage_meta = storage_writer.storage_meta()
            target = os.path.join(str(storage_writer.checkpoint_id), METADATA_FILE)
            write_file(target, prepared.metadata_chunks(storage_meta))
            _write_prepared_file(prepared, storage_meta, reports, path, identity)
        except Exception as error:  # becomes plain data: the peers wait for the answer
            causes = {own.rank: f"{type(error).__name__}: {error}"}
    return prepared, _Answer(causes=causes, identity=identity)


def _complete_metadata(planned: PlannedSave, reports: list[_Report]) -> Metadata:
    metadata = planned.metadata
    if metadata is None:
        raise ValueError("the coordinator has no planned metadata: pass the result of save_state_dict_async_plan")
    metadata.storage_data = {result.index: result.storage_data for report in reports for result in report.results}
    missing = describe_metadata(metadata).keys() - {item_of(index) for index in metadata.storage_data}
    if missing:
        raise ValueError(f"nobody wrote {min(missing, key=str)}, and {len(missing) - 1} more items")
    return metadata


def _write_prepared_file(
    prepared: PreparedMetadata,
    storage_meta: StorageMeta | None,
    reports: list[_Report],
    path: str,
    identity: str,
) -> None:
    """A checkpoint is there already: that the file for later jobs cannot be written must not cost it."""
    sections = [report.section for report in reports]
    try:
        write_file(path, prepared.file_chunks(storage_meta, sections, identity=identity))
    except OSError as error:
        logger.warning(
            "The prepared metadata %s could not be written (%s). This job reuses the layout from memory; "
            "later jobs need --ckpt-metadata-create again.",
            path,
            error.strerror,
        )
