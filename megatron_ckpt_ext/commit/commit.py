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
from megatron_ckpt_ext.commit.results import retrieve_results
from megatron_ckpt_ext.commit.status import Outcome, SaveStatus, Verdict, agree, share_cause
from megatron_ckpt_ext.commit.together import commit_together
from megatron_ckpt_ext.compat.dcp import ERRORS, METADATA_FILE
from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.body import BodyFile
from megatron_ckpt_ext.metadata.body_reader import BodyReader
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.items import places_of
from megatron_ckpt_ext.metadata.pickled import with_storage_meta
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.metadata.provenance import with_provenance
from megatron_ckpt_ext.plan.async_plan import PlannedSave
from megatron_ckpt_ext.publish.atomic import StagedFile
from megatron_ckpt_ext.write.lent_body import LentBody
from megatron_ckpt_ext.write.seal import Seal, Sealed, ToStage, discard, stage

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
        on_commit: Callable[[Committed], None] | None = None,
    ) -> None:
        """Prepare the end of a save. No collectives.

        Args:
            storage_writer: of this checkpoint.
            planned: result of planning.
            wrapper: torch's ``_DistWrapper`` of the save.
            fingerprint: settings to record in a new layout.
            file: where a new layout is kept for later jobs.
            on_drift: what to do where the save does not match.
            side_files: name -> content of what belongs to a checkpoint of this format, published before ``.metadata``.
            common: what must be equal on all ranks.
            on_end: called on each rank with how the save will be published, or ``None`` if it could not be written.
            on_commit: called on each rank once it has done its part; what it raises is logged.
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
        self._on_commit = on_commit
        self._prepared = planned.prepared
        self._results: Sequence[WriteResult] | None = None
        self._sealed: Sealed | None = None

    def seal(self, lent: LentBody) -> Seal | None:
        """Return what the writer can do behind its write; ``None`` if there is nothing to compare with. No collectives.

        Args:
            lent: lends the layout to the writer.

        Raises:
            OSError: the layout cannot be lent.
        """
        prepared, planned = self._prepared, self._planned
        if prepared is None or planned.drift is not None or planned.failure is not None:
            return None
        if not self._wrapper.is_coordinator:
            return Seal(places=prepared.places, directory=self._directory)
        if prepared.body is None:
            return None
        files = self._to_stage(lent.lend(prepared.body))
        return Seal(places=prepared.places, directory=self._directory, files=files)

    def outcome(self) -> Outcome:
        """Judge what this rank wrote; call it once, after its background write has ended. No collectives.

        The coordinator of a save that is ready has what it will publish durable under temporary names afterwards, so
        that a full disk is a vote as well and only renames are left.
        """
        outcome = self._judge()
        return outcome if self._common is None else replace(outcome, digest=self._common.vote())

    def _judge(self) -> Outcome:
        if self._planned.failure is not None:
            return Outcome(SaveStatus.FAILED, self._planned.failure)
        if self._sealed is None or not self._sealed.follows:
            found = self._look()
            if isinstance(found, Outcome):
                return found
            self._sealed = found
        if self._sealed.failure:
            return Outcome(SaveStatus.FAILED, self._sealed.failure)
        if self._sealed.lost:
            # Nothing has drifted. Where drift is to fail this must not refuse every later save too, as drift would.
            status = SaveStatus.FAILED if self._on_drift is OnDrift.FAIL else SaveStatus.DRIFT
            return Outcome(status, self._sealed.lost)
        return Outcome(SaveStatus.READY)

    def _look(self) -> Outcome | Sealed:
        """Do what no writer did: look at the results, and seal what follows the layout."""
        self._results, failure = retrieve_results(self._writer)
        if failure is not None:
            return Outcome(SaveStatus.FAILED, failure)
        if self._prepared is None:
            return Outcome(SaveStatus.DRIFT)
        drift = self._planned.drift or self._prepared.layout_drift(places_of(self._results))
        if drift is not None:
            return Outcome(SaveStatus.DRIFT, str(drift))
        if not self._wrapper.is_coordinator:
            return Sealed(follows=True)
        try:
            self._prepared = self._prepared.in_memory()
        except PreparedFileError as error:
            return Sealed(follows=True, lost=str(error))
        return stage(self._to_stage(self._prepared.body or b""), BodyReader(), directory=self._directory)

    def _to_stage(self, body: bytes | BodyFile) -> tuple[ToStage, ...]:
        identity = "" if self._prepared is None else self._prepared.identity
        layout = f"layout {identity}" if identity else "the layout of a save before"
        meta = with_provenance(self._writer.storage_meta(), f"reused {layout}")
        directory, suffix = self._directory, with_storage_meta(meta)
        side_files = [
            ToStage(path=os.path.join(directory, name), suffix=content) for name, content in self._side_files.items()
        ]
        # Last what makes it a checkpoint for whoever looks for .metadata only.
        return (*side_files, ToStage(path=os.path.join(directory, METADATA_FILE), body=body, suffix=suffix))

    @property
    def _directory(self) -> str:
        return str(self._writer.checkpoint_id)

    @property
    def path(self) -> str | None:
        """Directory of the checkpoint; ``None`` if this rank could not plan."""
        return None if self._writer is None else self._directory

    @property
    def writes_nothing(self) -> bool:
        """Whether this rank has nothing to write, so that no results will come."""
        return self._writer is None or self._writer.results_queue is None

    def takes_results_from(self, queue: Any) -> bool:
        """Whether ``queue`` is where the write function leaves its results; no if this rank writes nothing."""
        return queue is not None and not self.writes_nothing and self._writer.results_queue is queue

    def take(self, sealed: Sealed | None, results: Any) -> None:
        """Take what the writer answered. No collectives.

        Args:
            sealed: what came of the seal.
            results: box with the write results, in the place of NVRx's queue, which all saves of a process share;
                ``None`` if this rank writes nothing.
        """
        self._sealed = sealed
        if results is not None:
            self._writer.results_queue = results

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
        if self._on_commit is not None:
            try:
                self._on_commit(committed)
            except ERRORS:
                logger.exception("What follows a published checkpoint failed; the checkpoint stays.")
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
        if verdict.status is SaveStatus.READY and self._prepared is not None:
            return Committed(how=How.REUSED, prepared=self._prepared)
        staged, self._sealed = self._staged(), None
        discard(staged)
        if verdict.status is SaveStatus.FAILED:
            raise WriteFailedError(share_cause(verdict, outcome, self._wrapper))
        if self._on_drift is OnDrift.FAIL and self._prepared is not None:
            raise MetadataReuseError(share_cause(verdict, outcome, self._wrapper))
        return self._make_layout(outcome)

    def _tell(self, committed: Committed | None) -> None:
        if self._on_end is not None:
            self._on_end(committed)

    def _publish(self) -> None:
        """Rename what the coordinator has staged; a layout that all ranks made was published with them."""
        try:
            for file in self._staged():
                file.publish()
        except BaseException:
            discard(self._staged())
            raise

    def _staged(self) -> tuple[StagedFile, ...]:
        return () if self._sealed is None else self._sealed.staged

    def _make_layout(self, outcome: Outcome) -> Committed:
        made = commit_together(
            self._writer,
            self._planned,
            self._written,
            self._wrapper,
            drift=outcome.cause or None,
            fingerprint=self._fingerprint,
            side_files=self._side_files,
            file=self._file,
        )
        if self._prepared is None:
            return Committed(how=How.TOGETHER, prepared=made.prepared)
        reason = "unknown" if made.drifted is None else f"rank {made.drifted[0]}: {made.drifted[1]}"
        if self._wrapper.is_coordinator:
            logger.warning(
                "The layout changed, so this save was made with all ranks; it is complete, and later saves follow the "
                "new layout. %s.",
                reason,
            )
        return Committed(how=How.REBUILT, prepared=made.prepared, reason=reason)

    def _written(self) -> Sequence[WriteResult]:
        if self._results is None:
            self._results, failure = retrieve_results(self._writer)
            if failure is not None:
                raise RuntimeError(failure)
        return self._results


def vote_of(commit: SaveCommit) -> Outcome:
    """Return the outcome of a save; what goes wrong on the way is a vote too, for the peers are about to vote."""
    try:
        return commit.outcome()
    except ERRORS as error:
        return Outcome(SaveStatus.FAILED, f"checking what was written failed: {type(error).__name__}: {error}")
