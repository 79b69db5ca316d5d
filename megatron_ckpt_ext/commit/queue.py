"""``AsyncSaveQueue``: the queue of asynchronous saves of one job, with one small reduction a poll and no endless wait.

A duck type of NVRx's ``AsyncCallsQueue``, so Megatron uses it in that one's place. Whatever happens to a writer becomes
this rank's vote; whether to raise is decided by all ranks together.
"""

import atexit
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_ckpt_ext.commit.commit import SaveCommit
from megatron_ckpt_ext.commit.failures import WriteFailedError
from megatron_ckpt_ext.commit.status import Outcome, SaveStatus, Verdict, agree, share_cause
from megatron_ckpt_ext.compat.dcp import DistWrapper
from megatron_ckpt_ext.compat.mcore import is_collective_finalizer, writes_metadata_json
from megatron_ckpt_ext.compat.nvrx import forget_what_the_writer_has, join_instances, set_drain
from megatron_ckpt_ext.write.nothing import write_nothing
from megatron_ckpt_ext.write.worker import Call, ResultBox, WorkerSettings
from megatron_ckpt_ext.write.writer import Writer

__all__ = ["DEFAULT_TIMEOUT", "AsyncSaveQueue"]

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a save may go on without moving a byte."""
_POLL_SECONDS = 0.01
_RESULTS_ARGUMENT = 2
"""Place of the results queue among the arguments of NVRx's write functions."""


@dataclass(slots=True)
class _Active:
    """A save in flight."""

    index: int
    request: Any
    commit: SaveCommit | None
    box: ResultBox | None
    writer: Writer
    outcome: Outcome | None = None
    """What this rank votes, once its writer has ended."""
    concluded: bool = False
    """Whether the ranks have agreed on it, and only the confirmation is missing."""
    late_failure: str | None = None
    """What went wrong on this rank after the ranks agreed."""


class AsyncSaveQueue:
    """Saves in flight, in order, and the writer process that writes them.

    All methods that say "called on all ranks" must be called on all ranks in the same order. Owns a writer process and
    a gloo group that nobody else uses; ``close`` ends both, and the interpreter's exit ends the process.
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
            timeout: how long a save may go on without moving a byte; also the time-out of the group.
            start_writer: starts a writer process, or hands out one that was started before.
        """
        self._settings = settings
        self._timeout = timeout
        self._start_writer = start_writer
        self._calls: deque[_Active] = deque()
        self._last_index = -1
        self._writer: Writer | None = None
        self._wrapper: Any = None
        join_instances(self)
        set_drain(self._drain)
        atexit.register(self._end_writer)

    def schedule_async_request(self, async_request: Any) -> int:
        """Stage a save and start to write it. Called on all ranks; no collectives but, once, a new gloo group.

        Returns when the tensors may be changed again. A failure on this rank is voted later, never raised here.

        Args:
            async_request: NVRx's, Megatron's or any other with the same fields.

        Returns:
            The index of the save.
        """
        self._last_index += 1
        if self._wrapper is None:
            group: Any = dist.new_group(backend="gloo", timeout=self._timeout)
            self._wrapper = DistWrapper(group, True, 0)
        writer = self._live_writer()
        commit = next((fn for fn in async_request.finalize_fns if isinstance(fn, SaveCommit)), None)
        arguments, box = list(async_request.async_fn_args), None
        if commit is not None and len(arguments) > _RESULTS_ARGUMENT:
            box = arguments[_RESULTS_ARGUMENT] = ResultBox()
            commit.take_results_from(box)
        writer.submit(
            Call(
                index=self._last_index,
                function=async_request.async_fn or write_nothing,
                arguments=arguments,
                options=dict(async_request.async_fn_kwargs or {}),
                preload=async_request.preload_fn,
            )
        )
        self._calls.append(
            _Active(index=self._last_index, request=async_request, commit=commit, box=box, writer=writer)
        )
        return self._last_index

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize every save that all ranks have written.

        Called on all ranks: one MIN all_reduce a poll while saves are in flight, and what a save that drifted or failed
        needs. A save is confirmed by the poll after the one that published it.

        Args:
            blocking: go on until no save is in flight.
            no_dist: only wait for this rank's writer; finalizes nothing. No collectives.

        Returns:
            Indices of the saves that are finalized and confirmed.

        Raises:
            WriteFailedError: on every rank; the save published nothing, and is no longer in flight.
            MetadataReuseError: likewise.
        """
        if no_dist:
            self._drain()
            return []
        finalized = []
        while self._calls:
            call = self._calls[0]
            outcome = self._outcome(call)
            verdict = agree(outcome, self._wrapper, call=2 * call.index + call.concluded)
            if verdict.status is not SaveStatus.PENDING:
                if self._advance(call, verdict, outcome):
                    finalized.append(call.index)
            elif blocking:
                time.sleep(_POLL_SECONDS)
            if not blocking and self._calls and self._calls[0] is call:
                break
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Return how many saves are in flight. Equal on all ranks; no collectives."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalize what is in flight, end the writer process, leave the group. Safe to call twice.

        Called on all ranks unless ``abort``: then nothing is finalized, and no collectives run.
        """
        try:
            if not abort:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            set_drain(None)
            self._end_writer()
            atexit.unregister(self._end_writer)
            if self._wrapper is not None and not abort and dist.is_initialized():
                dist.destroy_process_group(self._wrapper.group)
            self._wrapper = None
            self._last_index = -1

    def _outcome(self, call: _Active) -> Outcome:
        """What this rank votes now."""
        if call.concluded:
            late = call.late_failure
            return Outcome(SaveStatus.READY) if late is None else Outcome(SaveStatus.FAILED, late)
        if call.outcome is None:
            state = call.writer.poll(call.index)
            if not state.ended:
                return Outcome(SaveStatus.PENDING)
            if call.box is not None:
                call.box.items.extend(state.results)
            call.outcome = _judge(state.failure, call.commit)
        return call.outcome

    def _advance(self, call: _Active, verdict: Verdict, outcome: Outcome) -> bool:
        """Do what all ranks agreed on; returns whether the save is finished."""
        rest = _remaining_finalizers(call)
        # Collective finalizers need all ranks in step; local ones run first where the save was published.
        in_step = any(map(is_collective_finalizer, rest))
        if call.concluded:
            self._drop(call)
            if verdict.status is SaveStatus.FAILED:
                raise WriteFailedError(share_cause(verdict, outcome, self._wrapper))
            if in_step or not self._wrapper.is_coordinator:
                _run(rest)
            return True
        try:
            self._conclude(call, verdict, outcome, [] if in_step else rest)
        except BaseException:
            self._drop(call)
            raise
        call.concluded = True
        if call.commit is None:
            self._drop(call)
        return call.commit is None

    def _conclude(self, call: _Active, verdict: Verdict, outcome: Outcome, rest: Sequence[Callable[[], Any]]) -> None:
        if call.commit is None:
            if verdict.status is SaveStatus.FAILED:
                raise WriteFailedError(share_cause(verdict, outcome, self._wrapper))
            _run(rest)
            return
        try:
            call.commit.conclude(verdict, outcome)
            if self._wrapper.is_coordinator:
                _run(rest)
        except OSError as error:
            # The others have agreed to publish and are gone: they hear of it in the confirmation.
            call.late_failure = f"publishing failed: {type(error).__name__}: {error}"

    def _drop(self, call: _Active) -> None:
        self._calls.remove(call)
        call.writer.forget(call.index)

    def _live_writer(self) -> Writer:
        if self._writer is None or not self._writer.usable:
            if self._writer is not None:
                logger.warning("The checkpoint writer process %s is replaced.", self._writer.pid)
                self._end_writer()
            forget_what_the_writer_has()
            self._writer = self._start_writer(self._settings(), self._timeout)
        return self._writer

    def _drain(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _judge(failure: str | None, commit: SaveCommit | None) -> Outcome:
    if failure is not None:
        return Outcome(SaveStatus.FAILED, failure)
    try:
        return Outcome(SaveStatus.READY) if commit is None else commit.outcome()
    except Exception as error:  # the peers are on their way to the reduction
        return Outcome(SaveStatus.FAILED, f"checking what was written failed: {type(error).__name__}: {error}")


def _remaining_finalizers(call: _Active) -> list[Callable[[], Any]]:
    """What is left to do after the commit: Megatron's tracker, loggers, and clean-up."""
    finalizers = [fn for fn in call.request.finalize_fns if fn is not call.commit]
    if call.commit is None:
        return finalizers
    return [fn for fn in finalizers if not writes_metadata_json(fn)]


def _run(finalizers: Sequence[Callable[[], Any]]) -> None:
    for finalizer in finalizers:
        finalizer()
