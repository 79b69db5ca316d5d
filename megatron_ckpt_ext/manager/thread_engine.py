"""Saves that a thread writes from staged host memory."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ckpt_ext.commit.failures import SaveFailedError, WriteFailedError
from megatron_ckpt_ext.commit.status import Outcome, SaveStatus, agree, reduce_min, share_cause
from megatron_ckpt_ext.compat.dcp import ERRORS
from megatron_ckpt_ext.events import Phase
from megatron_ckpt_ext.manager.accounting import Save
from megatron_ckpt_ext.manager.engine import Kit
from megatron_ckpt_ext.manager.groups import OwnGroup
from megatron_ckpt_ext.staging.stage import HostStager, Staged
from megatron_ckpt_ext.write.thread import WriterThread

__all__ = ["ThreadEngine"]

logger = logging.getLogger(__name__)

_PATIENCE = 3
"""A trainer may wait for a peer that first gives up on a save, whose writer first gave up on another one's vote."""


class ThreadEngine:
    """A thread writes what is staged in host memory, over groups that only this manager holds.

    The thread is the only one that uses its group; the trainer polls over another one.
    """

    def __init__(self, kit: Kit, group: dist.ProcessGroup | None, stager: HostStager) -> None:
        """Make groups, saver and thread. Called on all ranks: two new groups, one MIN all_reduce.

        Args:
            kit: of the manager.
            group: all ranks of the job.
            stager: closed with this.
        """
        self._kit = kit
        self._stager = stager
        self._writers = OwnGroup(group, kit.timeout)
        self._trainers = OwnGroup(group, _PATIENCE * kit.timeout)
        self._saver = kit.saver(process_group=self._writers.group, async_save=False)
        self._thread = WriterThread("checkpoint writer")
        self._bind_to_device = _binding_to_device()
        self._staged: Staged | None = None
        self._flying: tuple[Save, Future[None]] | None = None
        self._is_first = True
        self.is_broken = False

    def start(self, save: Save, state_dict: Mapping[str, Any]) -> None:
        """Stage, and hand over; what goes wrong in staging fails the save on every rank, the first one at once."""
        staged = self._stage(state_dict)
        if self._is_first:
            with self._kit.accounting.counting(save, Phase.STAGE):
                self._agree_on_first(staged)
        self._is_first = False
        if isinstance(staged, Staged):
            self._staged = staged
            self._kit.accounting.staged(save, items=staged.items, bytes=staged.bytes)
        self._flying = save, self._thread.submit(lambda: self._write(save, staged))

    def fence(self) -> None:
        """Make the current stream wait for the copies."""
        if self._staged is not None:
            self._staged.fence()

    def poll(self) -> bool:
        """One MIN all_reduce while a save is in flight, and one more when it has ended."""
        if self._flying is None:
            return True
        ended = int(self._flying[1].done())
        if self._trainers.wrapper.use_dist:
            (ended,) = reduce_min([ended], self._trainers.group)
        if ended:
            self.wait()
        return bool(ended)

    def wait(self) -> None:
        """One MIN all_reduce: what only this rank knows, such as that it waits no longer, is decided by all."""
        if self._flying is None:
            return
        _, future = self._flying
        error = self._ended(future)  # an interrupted wait can be waited for again
        is_shared = error is None or isinstance(error, SaveFailedError)
        try:
            self._agree(None if is_shared else f"{type(error).__name__}: {error}")
        except WriteFailedError:
            self._flying = self._staged = None
            self.is_broken = True
            raise
        self._flying = self._staged = None
        if error is not None:
            raise error

    def leave(self, *, failed: bool) -> None:
        """Wait for the thread, which needs nobody's trainer. No collectives on this thread."""
        flying, self._flying = self._flying, None
        if flying is not None and (error := self._ended(flying[1])) is not None:
            raise error

    def close(self) -> None:
        """Let the thread finish, then free host memory and leave the groups."""
        if not self._thread.close(timedelta() if self.is_broken else self._kit.timeout):
            logger.warning("The checkpoint writer does not end: its memory and its groups stay.")
            return
        self._saver.close()
        self._stager.close()
        self._writers.close()
        self._trainers.close()

    def _agree(self, cause: str | None) -> None:
        """Fail on every rank if one of them has a cause. Called on all ranks: one MIN all_reduce."""
        outcome = Outcome(SaveStatus.READY) if cause is None else Outcome(SaveStatus.FAILED, cause)
        verdict = agree(outcome, self._trainers.wrapper)
        if verdict.status is SaveStatus.FAILED:
            raise WriteFailedError(share_cause(verdict, outcome, self._trainers.wrapper))

    def _ended(self, future: "Future[None]") -> BaseException | None:
        try:
            return future.exception(self._kit.timeout.total_seconds())
        except TimeoutError:
            limit = self._kit.timeout.total_seconds()
            return TimeoutError(f"the writer thread did not end within {limit:g} s; what it writes may still appear")

    def _stage(self, state_dict: Mapping[str, Any]) -> Staged | BaseException:
        try:
            return self._stager.stage(state_dict)
        except ERRORS as error:  # a vote: the peers' threads are on their way to it
            return error

    def _agree_on_first(self, staged: Staged | BaseException) -> None:
        """Refuse a state that one rank has no room for before anything is written, on every rank."""
        try:
            self._agree(None if isinstance(staged, Staged) else f"staging failed: {type(staged).__name__}: {staged}")
        except WriteFailedError:
            if isinstance(staged, Staged):
                staged.wait()
                staged.release()
            raise

    def _write(self, save: Save, staged: Staged | BaseException) -> None:
        began = time.monotonic()
        size = staged.bytes if isinstance(staged, Staged) else 0

        def state() -> Mapping[str, Any]:
            if not isinstance(staged, Staged):
                raise staged
            staged.wait()
            return staged.state

        try:
            self._bind_to_device()
            display = self._kit.display.writing(save.path, self._writers.wrapper.rank, size)
            with display, self._kit.accounting.counting(save, Phase.WRITE):
                finished = self._saver.save_now(state, save.path, number=save.step, on_host=True)
        finally:
            if isinstance(staged, Staged):
                staged.release()
        if self.is_broken:  # all ranks have been told that it failed
            return
        self._kit.accounting.written(save, began)
        self._kit.durable(save, finished.committed)


def _binding_to_device() -> Callable[[], None]:
    """Return what binds another thread to this one's device: any CUDA call there would make a context on device 0."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)
