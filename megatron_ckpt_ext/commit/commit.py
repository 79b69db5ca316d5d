"""The end of one save: what this rank votes, and what follows from what all ranks decided."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.commit.common_state import CommonState
from megatron_ckpt_ext.commit.failures import MetadataReuseError, WriteFailedError
from megatron_ckpt_ext.commit.prepared_file import PreparedFile
from megatron_ckpt_ext.commit.results import follows, retrieve_results, written_items
from megatron_ckpt_ext.commit.status import Outcome, SaveStatus, Verdict, agree, share_cause
from megatron_ckpt_ext.commit.together import commit_together
from megatron_ckpt_ext.compat.dcp import METADATA_FILE
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.async_plan import PlannedSave
from megatron_ckpt_ext.publish.atomic import StagedFile, stage_file, write_file

__all__ = ["Committed", "How", "OnDrift", "SaveCommit", "vote_of"]

logger = logging.getLogger(__name__)


class OnDrift(StrEnum):
    """What a save does that does not match the prepared metadata (``--ckpt-metadata-on-drift``)."""

    REBUILD = "rebuild"
    """Make the layout anew with all ranks, in the same save."""
    FAIL = "fail"
    """Publish nothing and raise on every rank."""


class How(StrEnum):
    """How a save got its ``.metadata``."""

    REUSED = "reused"
    """From the prepared metadata."""
    TOGETHER = "together"
    """Made by all ranks: there was no layout to follow."""
    REBUILT = "rebuilt"
    """Made by all ranks: what there was did not match."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A published save."""

    how: How
    """Where its layout came from."""
    prepared: PreparedMetadata
    """The layout that the next save follows."""
    reason: str | None = None
    """Why it was rebuilt."""


class SaveCommit:
    """The end of one save on this rank: ``outcome``, a vote of all ranks on it, ``conclude``.

    The vote is separate, so that whoever polls the writers can fold it into the reduction of its poll.
    """

    def __init__(
        self,
        storage_writer: Any,
        planned: PlannedSave,
        wrapper: Any,
        *,
        fingerprint: Fingerprint,
        file: PreparedFile | None = None,
        on_drift: OnDrift = OnDrift.REBUILD,
        side_files: Mapping[str, bytes] | None = None,
        common: CommonState | None = None,
        on_end: Callable[[Committed | None], None] | None = None,
    ) -> None:
        """Prepare the end of a save. No collectives.

        Args:
            storage_writer: of this checkpoint.
            planned: result of planning.
            wrapper: torch's ``_DistWrapper`` of the save.
            fingerprint: settings to record in a new layout.
            file: where a new layout is kept for later jobs.
            on_drift: what to do where the save does not match.
            side_files: name -> content of what belongs to a checkpoint of this format, published after ``.metadata``.
            common: what must be equal on all ranks.
            on_end: called on each rank with the published save, or ``None`` if it could not be written.
        """
        self._writer = storage_writer
        self._planned = planned
        self._wrapper = wrapper
        self._fingerprint = fingerprint
        self._file = file
        self._on_drift = on_drift
        self._side_files = side_files or {}
        self._common = common
        self._on_end = on_end
        self._results: Sequence[WriteResult] = ()
        self._staged: StagedFile | None = None

    def outcome(self) -> Outcome:
        """Judge what this rank wrote; call it once, after its background write has ended. No collectives.

        The coordinator of a save that is ready has its ``.metadata`` durable under a temporary name afterwards, so that
        a full disk is a vote as well and only a rename is left.
        """
        outcome = self._compare()
        return outcome if self._common is None else replace(outcome, digest=self._common.vote())

    def _compare(self) -> Outcome:
        if self._planned.failure is not None:
            return Outcome(SaveStatus.FAILED, self._planned.failure)
        self._results, failure = retrieve_results(self._writer)
        if failure is not None:
            return Outcome(SaveStatus.FAILED, failure)
        prepared = self._planned.prepared
        if prepared is None:
            return Outcome(SaveStatus.DRIFT)
        drift = self._planned.drift
        if drift is None and not follows(prepared.slice, self._results):
            drift = prepared.layout_drift(written_items(self._results))
        if drift is not None:
            return Outcome(SaveStatus.DRIFT, str(drift))
        return self._stage(prepared) if self._wrapper.is_coordinator else Outcome(SaveStatus.READY)

    def takes_results_from(self, queue: Any) -> bool:
        """Whether ``queue`` is where the write function leaves its results; no if this rank writes nothing."""
        return self._writer is not None and queue is not None and self._writer.results_queue is queue

    def take_results_from(self, box: Any) -> None:
        """Take the write results from ``box`` in place of NVRx's queue, which all saves of a process share.

        Args:
            box: has ``get_nowait`` as a queue has.
        """
        self._writer.results_queue = box

    def conclude(self, verdict: Verdict, outcome: Outcome) -> Committed:
        """Publish the save, or make its layout with all ranks, or raise.

        Called on all ranks; no collectives if the verdict is ready, else those of ``share_cause`` or
        ``commit_together``.

        Raises:
            WriteFailedError: a rank could not write; on every rank, nothing is published.
            MetadataReuseError: a rank drifted and drift is to fail; on every rank, nothing is published.
            OSError: on the coordinator only, while publishing.
        """
        if self._common is not None and not verdict.alike:
            self._common.report(self._wrapper)
        try:
            committed = self._conclude(verdict, outcome)
        except WriteFailedError:
            self.withdraw()
            raise
        # Told before anything can fail on this rank alone, so that the next save is planned alike on all of them.
        self._tell(committed)
        self._publish()
        return committed

    def withdraw(self) -> None:
        """Tell the owner of the layout that the save failed, alike on all ranks. No collectives.

        What failed may have been the layout itself, so the next save is planned together.
        """
        self._tell(None)

    def __call__(self) -> None:
        """Vote and conclude, as a finalizer in a queue that does not vote itself. Called on all ranks."""
        self.run()

    def run(self) -> Committed:
        """Vote and conclude. Called on all ranks: one MIN all_reduce first."""
        outcome = vote_of(self)
        return self.conclude(agree(outcome, self._wrapper), outcome)

    def _conclude(self, verdict: Verdict, outcome: Outcome) -> Committed:
        if verdict.status is SaveStatus.READY and self._planned.prepared is not None:
            return Committed(how=How.REUSED, prepared=self._planned.prepared)
        if self._staged is not None:
            self._staged.discard()
            self._staged = None
        if verdict.status is SaveStatus.FAILED:
            raise WriteFailedError(share_cause(verdict, outcome, self._wrapper))
        if self._on_drift is OnDrift.FAIL and self._planned.prepared is not None:
            raise MetadataReuseError(share_cause(verdict, outcome, self._wrapper))
        return self._make_layout(outcome)

    def _tell(self, committed: Committed | None) -> None:
        if self._on_end is not None:
            self._on_end(committed)

    def _publish(self) -> None:
        """What the coordinator does alone: the rename, if the layout was not just made, and the side files."""
        if self._staged is not None:
            try:
                self._staged.publish()
            finally:
                self._staged.discard()
        if self._wrapper.is_coordinator:
            for name, content in self._side_files.items():
                write_file(os.path.join(str(self._writer.checkpoint_id), name), [content])

    def _stage(self, prepared: PreparedMetadata) -> Outcome:
        path = os.path.join(str(self._writer.checkpoint_id), METADATA_FILE)
        try:
            self._staged = stage_file(path, prepared.metadata_chunks(self._writer.storage_meta()))
        except Exception as error:  # the peers are on their way to the reduction
            return Outcome(SaveStatus.FAILED, f"{path} could not be written: {type(error).__name__}: {error}")
        return Outcome(SaveStatus.READY)

    def _make_layout(self, outcome: Outcome) -> Committed:
        made = commit_together(
            self._writer,
            self._planned,
            self._results,
            self._wrapper,
            drift=outcome.cause or None,
            fingerprint=self._fingerprint,
            file=self._file,
        )
        if self._planned.prepared is None:
            return Committed(how=How.TOGETHER, prepared=made.prepared)
        reason = "unknown" if made.drifted is None else f"rank {made.drifted[0]}: {made.drifted[1]}"
        if self._wrapper.is_coordinator:
            logger.warning(
                "The layout changed, so this save was made with all ranks; it is complete, and later saves follow the "
                "new layout. %s.",
                reason,
            )
        return Committed(how=How.REBUILT, prepared=made.prepared, reason=reason)


def vote_of(commit: SaveCommit) -> Outcome:
    """Return the outcome of a save; what goes wrong on the way is a vote too, for the peers are about to vote."""
    try:
        return commit.outcome()
    except Exception as error:
        return Outcome(SaveStatus.FAILED, f"checking what was written failed: {type(error).__name__}: {error}")
