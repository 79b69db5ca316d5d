"""``AsyncSaveQueue``: the queue of asynchronous saves of one job, with one small reduction a poll and no endless wait.

A duck type of NVRx's ``AsyncCallsQueue``, so Megatron uses it in that one's place. Whatever happens to a writer becomes
this rank's vote; whether to raise is decided by all ranks together.
"""

import atexit
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from megatron_ckpt_ext.commit.commit import SaveCommit, vote_of
from megatron_ckpt_ext.commit.failures import PublishFailedError, SaveFailedError, WriteFailedError
from megatron_ckpt_ext.commit.finalizers import Finalizers, report
from megatron_ckpt_ext.commit.status import Outcome, SaveStatus, Verdict, agree, share_cause
from megatron_ckpt_ext.compat.dcp import ERRORS, DistWrapper
from megatron_ckpt_ext.compat.nvrx import drain_before_reuse, forget_what_the_writer_has, join_instances
from megatron_ckpt_ext.write.lent_body import LentBody
from megatron_ckpt_ext.write.nothing import write_nothing
from megatron_ckpt_ext.write.worker import Call, ReceivedResults, ResultBox, WorkerSettings
from megatron_ckpt_ext.write.writer import DEFAULT_TIMEOUT, Writer

__all__ = ["DEFAULT_TIMEOUT", "AsyncSaveQueue", "group_timeout"]

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.01
_VOTES = 3
"""Most votes of one save, to number them."""
_RESULTS_ARGUMENT = 2
"""Place of the results queue among the arguments of NVRx's write functions."""


def group_timeout(timeout: timedelta) -> timedelta:
    """Return how long ranks wait for each other: a peer may first give up on a save that it drains, then on its own."""
    return 3 * timeout


@dataclass(kw_only=True, slots=True)
class _Active:
    """A save in flight."""

    index: int
    request: Any
    commit: SaveCommit | None
    finalizers: Finalizers
    writer: Writer | None = None
    """Who writes it; ``None`` if no process could be started."""
    results: Any = None
    """The queue that the write function was to leave its results in; they come in the writer's answer."""
    outcome: Outcome | None = None
    """What this rank votes, once its writer has ended."""
    stage: int = 0
    """How often the ranks have agreed on it: first to publish it, then that it was published."""
    late_error: BaseException | None = None
    """What went wrong on this rank after the ranks agreed."""

    @property
    def name(self) -> str:
        """What an operator knows it by."""
        path = None if self.commit is None else self.commit.path
        return f"number {self.index}" if path is None else path

    @property
    def confirmations(self) -> int:
        """How many follow the vote: one more where all ranks have something to do that can fail."""
        return 2 if self.finalizers.need_all_ranks else 1


class AsyncSaveQueue:
    """Saves in flight, in order, and the writer process that writes them.

    All methods that say "called on all ranks" must be called on all ranks in the same order. Owns a writer process and
    a gloo group that nobody else uses; ``close`` ends both, and the interpreter's exit ends the process.

    Attributes:
        consecutive_failures: saves that failed since the last that was finalized. Equal on all ranks.
    """

    def __init__(
        self,
        settings: Callable[[], WorkerSettings],
        *,
        timeout: timedelta = DEFAULT_TIMEOUT,
        start_writer: Callable[[WorkerSettings, timedelta], Writer] = Writer,
    ) -> None:
        """Build an idle queue. No collectives; may run before torch.distributed is initialised.

        Args:
            settings: of the writer process, asked for when one is started.
            timeout: how long a save may go on without moving a byte; a rank that does not come to vote ends the job
                after three times that.
            start_writer: starts a writer process, or hands out one that was started before.
        """
        self._settings = settings
        self._timeout = timeout
        self._start_writer = start_writer
        self.consecutive_failures = 0
        self._calls: deque[_Active] = deque()
        self._last_index = -1
        self._writer: Writer | None = None
        self._lent = LentBody()
        self._wrapper: Any = None
        join_instances(self)

    def schedule_async_request(self, async_request: Any) -> int:
        """Stage a save and start to write it. Called on all ranks; no collectives but, once, a new gloo group.

        Returns when the tensors may be changed again. A failure on this rank is voted later, never raised here.

        Args:
            async_request: NVRx's, Megatron's or any other with the same fields.

        Returns:
            The index of the save.
        """
        if self._wrapper is None:
            self._open()
        self._last_index += 1
        commit = next((fn for fn in async_request.finalize_fns if isinstance(fn, SaveCommit)), None)
        finalizers = Finalizers(async_request.finalize_fns, commit)
        call = _Active(index=self._last_index, request=async_request, commit=commit, finalizers=finalizers)
        self._calls.append(call)
        try:
            self._refuse_same_directory(call)
            call.writer = self._live_writer()
            call.writer.submit(_to_send(call, self._lent))
        except ERRORS as error:  # the peers are on their way to the reduction
            call.outcome = Outcome(SaveStatus.FAILED, f"staging failed: {type(error).__name__}: {error}")
        return call.index

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the oldest save if all ranks have written it, or all saves.

        Called on all ranks: one MIN all_reduce a poll while saves are in flight, and what a save that drifted or failed
        needs. A save is confirmed by the poll after the one that published it.

        Args:
            blocking: go on until no save is in flight.
            no_dist: only wait for this rank's writer; finalizes nothing. No collectives.

        Returns:
            Indices of the saves that are finalized and confirmed.

        Raises:
            WriteFailedError: on every rank; the save is no longer in flight.
            MetadataReuseError: likewise.
        """
        if no_dist:
            self._drain()
            return []
        if not self._calls:
            self._retire_lost_writer()
        finalized = []
        while self._calls:
            call = self._calls[0]
            outcome = self._outcome(call)
            verdict = agree(outcome, self._wrapper, call=_VOTES * call.index + call.stage)
            if verdict.status is not SaveStatus.PENDING:
                if self._counted(call, verdict, outcome):
                    finalized.append(call.index)
            elif blocking:
                time.sleep(_POLL_SECONDS)
            if not blocking:
                break
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Return how many saves are in flight. Equal on all ranks; no collectives."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalize what is in flight, end the writer process, leave the group. Safe to call twice, or to go on after.

        Called on all ranks unless ``abort``: then nothing is finalized, and no collectives run.

        Raises:
            WriteFailedError: on every rank, of the first save that failed; the others were finalized, all is closed.
            MetadataReuseError: likewise.
        """
        failures: list[SaveFailedError] = []
        try:
            while self._calls and not abort:
                try:
                    self.maybe_finalize_async_calls(blocking=True)
                except SaveFailedError as error:
                    failures.append(error)
        finally:
            self._shut(leave_group=not abort)
        if failures:
            raise failures[0]

    def _open(self) -> None:
        group: Any = dist.new_group(backend="gloo", timeout=group_timeout(self._timeout))
        self._wrapper = DistWrapper(group, True, 0)
        drain_before_reuse()
        atexit.register(self._abandon)

    def _shut(self, *, leave_group: bool) -> None:
        wrapper, self._wrapper = self._wrapper, None
        self._abandon()
        self._calls.clear()
        self._last_index = -1
        self._lent.close()
        if wrapper is None:
            return
        atexit.unregister(self._abandon)
        if leave_group and dist.is_initialized():
            dist.destroy_process_group(wrapper.group)

    def _outcome(self, call: _Active) -> Outcome:
        """What this rank votes now."""
        if call.stage > 0:
            late = call.late_error
            if late is None:
                return Outcome(SaveStatus.READY)
            return Outcome(SaveStatus.FAILED, f"publishing failed: {type(late).__name__}: {late}")
        if call.outcome is None and call.writer is not None:
            state = call.writer.poll(call.index)
            if not state.ended:
                return Outcome(SaveStatus.PENDING)
            call.outcome = Outcome(SaveStatus.READY)
            if state.failure is not None:
                call.outcome = Outcome(SaveStatus.FAILED, state.failure)
            elif call.commit is not None:
                results = None if call.results is None else ReceivedResults(state.results)
                call.commit.take(state.sealed, results)
                call.outcome = vote_of(call.commit)
            elif call.results is not None:
                for item in ReceivedResults(state.results).all():
                    call.results.put(item)
        return call.outcome or Outcome(SaveStatus.PENDING)

    def _counted(self, call: _Active, verdict: Verdict, outcome: Outcome) -> bool:
        try:
            finished = self._advance(call, verdict, outcome)
        except SaveFailedError:
            self.consecutive_failures += 1
            raise
        if finished:
            self.consecutive_failures = 0
        return finished

    def _advance(self, call: _Active, verdict: Verdict, outcome: Outcome) -> bool:
        """Do what all ranks agreed on; returns whether the save is finished."""
        if call.stage == 0:
            self._conclude(call, verdict, outcome)
        elif verdict.status is SaveStatus.FAILED:
            self._drop(call)
            if call.commit is not None:
                call.commit.withdraw()
            raise PublishFailedError(share_cause(verdict, outcome, self._wrapper)) from call.late_error
        else:
            self._confirmed(call)
        call.stage += 1
        if call.stage <= call.confirmations:
            return False
        self._drop(call)
        if call.late_error is not None:  # nobody waits for this any more
            report(call.late_error)
        return True

    def _conclude(self, call: _Active, verdict: Verdict, outcome: Outcome) -> None:
        try:
            if call.commit is not None:
                call.commit.conclude(verdict, outcome)
            elif verdict.status is SaveStatus.FAILED:
                raise WriteFailedError(share_cause(verdict, outcome, self._wrapper))
            call.finalizers.run_unconfirmed(is_coordinator=self._wrapper.is_coordinator)
        except SaveFailedError:
            self._drop(call)
            # What failed may be the staging, after which this process and the writer disagree about what it has.
            forget_what_the_writer_has()
            raise
        except ERRORS as error:
            # The others have agreed to publish and are gone: they hear of it in the confirmation.
            call.late_error = error

    def _confirmed(self, call: _Active) -> None:
        if call.stage > 1:
            return
        try:
            call.finalizers.run_confirmed(is_coordinator=self._wrapper.is_coordinator)
        except ERRORS as error:
            call.late_error = error

    def _refuse_same_directory(self, call: _Active) -> None:
        """Fail saves that overlap in one directory: planning the later one has removed files of the earlier.

        Raises:
            RuntimeError: for the later one; the earlier one has failed as well.
        """
        for other in list(self._calls)[:-1]:
            if call.commit is not None and other.commit is not None and call.commit.path == other.commit.path:
                if other.stage == 0:
                    other.outcome = Outcome(SaveStatus.FAILED, "a later save was planned into the same directory")
                raise RuntimeError(f"a save into {call.commit.path} is in flight: wait for it, or save elsewhere")

    def _drop(self, call: _Active) -> None:
        self._calls.remove(call)
        if call.writer is not None:
            call.writer.forget(call.index)
        self._retire_lost_writer()

    def _live_writer(self) -> Writer:
        self._retire_lost_writer()
        if self._writer is None:
            self._writer = self._start_writer(self._settings(), self._timeout)
        return self._writer

    def _retire_lost_writer(self) -> None:
        """Notice a lost writer before the next save is planned, which would else rely on what that writer had."""
        if self._writer is not None and not self._writer.usable:
            logger.warning(
                "The checkpoint writer process %s is lost; the next save starts a new one.", self._writer.pid
            )
            self._end_writer()

    def _drain(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def _abandon(self) -> None:
        """End the writer, and say which saves that cuts off; they are not published, so nothing takes them for done."""
        if self._calls:
            saves = ", ".join(call.name for call in self._calls)
            logger.warning("Checkpoint saves in flight are given up and were not finalized: %s.", saves)
        for call in self._calls:
            if call.writer is not None and call.stage == 0:
                call.writer.abandon(call.index)
        self._end_writer()

    def _end_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            forget_what_the_writer_has()


def _to_send(call: _Active, lent: LentBody) -> Call:
    """What the writer gets; results come back in its answer, not in NVRx's queue that all saves share."""
    request, commit, seal = call.request, call.commit, None
    arguments = list(request.async_fn_args)
    results = arguments[_RESULTS_ARGUMENT] if len(arguments) > _RESULTS_ARGUMENT else None
    # Megatron moves the finalizers of a save to the request of its logits, which comes behind it and has arguments of
    # its own. Then the results are those of a request without a commit, and the commit finds them where it looks.
    if isinstance(results, SimpleQueue) or (commit is not None and commit.takes_results_from(results)):
        call.results, arguments[_RESULTS_ARGUMENT] = results, ResultBox()
    if commit is not None and (call.results is not None or commit.writes_nothing):
        seal = commit.seal(lent)
    return Call(
        index=call.index,
        function=request.async_fn or write_nothing,
        arguments=arguments,
        options=dict(request.async_fn_kwargs or {}),
        preload=request.preload_fn,
        seal=seal,
    )
