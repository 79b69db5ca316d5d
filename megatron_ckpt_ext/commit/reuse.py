"""Finalizing a save that followed a prepared metadata: guard, one reduction, rename."""

import os
from typing import Any

from megatron_ckpt_ext.commit.failures import MetadataReuseError, WriteFailedError
from megatron_ckpt_ext.commit.results import retrieve_results, written_items
from megatron_ckpt_ext.commit.status import Outcome, SaveStatus, agree, share_cause
from megatron_ckpt_ext.compat.dcp import METADATA_FILE
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.async_plan import PlannedSave
from megatron_ckpt_ext.publish.atomic import StagedFile, stage_file

__all__ = ["finalize_reuse"]


def finalize_reuse(
    storage_writer: Any, planned: PlannedSave, prepared: PreparedMetadata, wrapper: Any
) -> PreparedMetadata:
    """Agree on a save and publish its ``.metadata``. Called on all ranks: one MIN all_reduce.

    The coordinator votes with the ``.metadata`` already durable under a temporary name, so that a full disk is a
    vote as well and only a rename is left.

    Raises:
        WriteFailedError: a rank could not write; on every rank, nothing is published.
        MetadataReuseError: a rank drifted; on every rank, nothing is published.
    """
    outcome = _local_outcome(storage_writer, planned, prepared)
    staged: StagedFile | None = None
    if wrapper.is_coordinator and outcome.status is SaveStatus.READY:
        outcome, staged = _stage_metadata(storage_writer, prepared)
    try:
        verdict = agree(outcome, wrapper)
        if verdict.status is SaveStatus.READY:
            if staged is not None:
                staged.publish()
            return prepared
        causes = share_cause(verdict, outcome, wrapper)
    finally:
        if staged is not None:
            staged.discard()
    raise WriteFailedError(causes) if verdict.status is SaveStatus.FAILED else MetadataReuseError(causes)


def _local_outcome(storage_writer: Any, planned: PlannedSave, prepared: PreparedMetadata) -> Outcome:
    results, failure = retrieve_results(storage_writer)
    if failure is not None:
        return Outcome(SaveStatus.FAILED, failure)
    drift = planned.drift or prepared.layout_drift(written_items(results))
    return Outcome(SaveStatus.READY) if drift is None else Outcome(SaveStatus.DRIFT, str(drift))


def _stage_metadata(storage_writer: Any, prepared: PreparedMetadata) -> tuple[Outcome, StagedFile | None]:
    path = os.path.join(str(storage_writer.checkpoint_id), METADATA_FILE)
    try:
        staged = stage_file(path, prepared.metadata_chunks(storage_writer.storage_meta()))
    except Exception as error:  # must become a vote: the peers are on their way to the reduction
        return Outcome(SaveStatus.FAILED, f"{path} could not be written: {error}"), None
    return Outcome(SaveStatus.READY), staged
