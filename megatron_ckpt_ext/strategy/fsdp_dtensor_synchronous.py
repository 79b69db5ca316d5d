"""Writing a planned save here and now, with torch's own writer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.commit.commit import Committed, SaveCommit, vote_of
from megatron_ckpt_ext.commit.failures import PublishFailedError, SaveFailedError
from megatron_ckpt_ext.commit.status import Outcome, SaveStatus, agree, share_cause
from megatron_ckpt_ext.compat.dcp import ERRORS, FileWriter
from megatron_ckpt_ext.compat.dtensor import storage_prefix

__all__ = ["SynchronousWriter", "commit_now"]


class SynchronousWriter(FileWriter):
    """torch's ``FileSystemWriter``, with the parts of NVRx's that the end of a save asks for."""

    results_queue = None
    """No other process answers."""

    def __init__(self, path: str, *, thread_count: int, owner: int, on_host: bool = False) -> None:
        """Build the writer of one checkpoint. No collectives.

        Args:
            path: directory of the checkpoint.
            thread_count: files that this rank writes.
            owner: this rank, for the names of its files.
            on_host: whether all tensors are in host memory: torch then leaves CUDA alone, and does not wait for what
                the device is doing.
        """
        super().__init__(path, thread_count=thread_count)
        if on_host:
            self.per_thread_copy_ahead = 0
        self._owner = owner
        self._results: Sequence[WriteResult] | None = None
        self._failure = "nothing was written"

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Say how the files of this rank are called: as if the coordinator had said it."""
        return replace(local_plan, storage_data=storage_prefix(self._owner))

    def write(self, plan: SavePlan, planner: Any) -> None:
        """Write; what goes wrong is told to who retrieves the results. No collectives."""
        try:
            future = self.write_data(plan, planner)
            future.wait()
            self._results = future.value()
        except ERRORS as error:  # a vote: the peers are on their way to the reduction
            self._failure = f"writing failed: {type(error).__name__}: {error}"

    def retrieve_write_results(self) -> Sequence[WriteResult]:
        """Return what was written.

        Raises:
            OSError: writing failed.
        """
        if self._results is None:
            raise OSError(self._failure)
        return self._results


def commit_now(commit: SaveCommit, wrapper: Any, *, number: int = 0) -> Committed:
    """Vote, conclude, and confirm. Called on all ranks: two MIN all_reduces, and what drift or failure needs.

    Args:
        commit: of this save.
        wrapper: torch's ``_DistWrapper`` of the save.
        number: of the save, below 2**61; ranks that save different ones raise instead of publishing a mixture.

    Raises:
        SaveFailedError: on every rank.
        RuntimeError: on every rank: the ranks vote on different saves.
    """
    outcome = vote_of(commit)
    verdict, late, committed = agree(outcome, wrapper, call=2 * number), None, None
    try:
        committed = commit.conclude(verdict, outcome)
    except SaveFailedError:
        raise
    except ERRORS as error:  # the others have agreed to publish: they hear of it in the confirmation
        late = error
    confirmation = Outcome(SaveStatus.READY)
    if late is not None:
        confirmation = Outcome(SaveStatus.FAILED, f"publishing failed: {type(late).__name__}: {late}")
    confirmed = agree(confirmation, wrapper, call=2 * number + 1)
    if confirmed.status is SaveStatus.FAILED or committed is None:
        commit.withdraw()
        raise PublishFailedError(share_cause(confirmed, confirmation, wrapper)) from late
    return committed
