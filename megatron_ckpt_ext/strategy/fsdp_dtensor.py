"""``save_fsdp_dtensor``: saves of DTensor state dicts (FSDP2, Megatron-FSDP) that follow one layout."""

import contextlib
import logging
import os
import queue
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from megatron_ckpt_ext.commit.commit import Committed, OnDrift, SaveCommit
from megatron_ckpt_ext.commit.failures import WriteFailedError
from megatron_ckpt_ext.commit.prepared_file import PreparedFile
from megatron_ckpt_ext.compat.dcp import ERRORS, DistWrapper
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.async_plan import PlannedSave, failed_save
from megatron_ckpt_ext.plan.dtensor_exchange import ExchangeError
from megatron_ckpt_ext.plan.dtensor_holdings import Entry
from megatron_ckpt_ext.plan.dtensor_plan import KnownPlan, plan_dtensors
from megatron_ckpt_ext.strategy.fsdp_dtensor_commit import SettlingCommit
from megatron_ckpt_ext.strategy.fsdp_dtensor_mode import Mode, agree_on_mode, decide_mode, find_facts, probed_writer
from megatron_ckpt_ext.strategy.fsdp_dtensor_saves import Ending, FinishedSave, StartedSave
from megatron_ckpt_ext.strategy.fsdp_dtensor_synchronous import SynchronousWriter, commit_now
from megatron_ckpt_ext.write.nothing import write_nothing
from megatron_ckpt_ext.write.worker import WorkerSettings
from megatron_ckpt_ext.write.writer import DEFAULT_TIMEOUT, Writer

if TYPE_CHECKING:
    from megatron_ckpt_ext.commit.queue import AsyncSaveQueue

logger = logging.getLogger(__name__)

__all__ = ["FinishedSave", "FsdpDtensorSaver", "StartedSave", "StateDict", "save_fsdp_dtensor"]

type StateDict = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""A state dict, or what returns it when the save is planned."""


class FsdpDtensorSaver:
    """The saves of one job: their layout, the plan of the last one, and whether they are asynchronous.

    Owns a queue with a writer process, unless it is given one or saves synchronously; ``close`` ends both.

    Attributes:
        mode: asynchronous or not, and why; equal on all ranks.
        prepared: the layout that the next save follows; ``None`` before the first save is published, and after a
            failed one: such a save is planned together.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        prepared_metadata: PreparedMetadata | None = None,
        ckpt_metadata_create_path: str | None = None,
        on_drift: OnDrift = OnDrift.REBUILD,
        async_save: bool = True,
        uneven: bool = False,
        fingerprint: Fingerprint | None = None,
        thread_count: int = 1,
        use_cpu_shm: bool = False,
        timeout: timedelta | None = None,
        settings: Callable[[], WorkerSettings] | None = None,
        start_writer: Callable[[WorkerSettings, timedelta], Writer] = Writer,
        mode: Mode | None = None,
        on_commit: Callable[[Committed], None] | None = None,
    ) -> None:
        """Decide how to save. Called on all ranks before training: one MIN all_reduce; a broadcast if it falls back.

        Args:
            process_group: all ranks of the job; by default the default group.
            prepared_metadata: follow this layout from the first save on.
            ckpt_metadata_create_path: keep the layout here for later jobs.
            on_drift: what a save does that does not match the layout.
            async_save: whether asynchronous saves are asked for.
            uneven: whether the shards of DTensors have sizes that mesh and placements do not give (Megatron-FSDP).
            fingerprint: settings to record in a new layout.
            thread_count: files that each rank writes.
            use_cpu_shm: whether tensors are copied into shared memory by the trainer, and not by the writer.
            timeout: how long a save may go on without moving a byte.
            settings: of the writer process.
            start_writer: starts it.
            mode: what was decided already, equal on all ranks: then nothing is tried, no writer is started, and no
                collectives run. An asynchronous save is then only given out as a ``request``, for another queue.
            on_commit: called on each rank with every published save.

        Raises:
            ValueError: both a prepared metadata and a path to create one.
        """
        if prepared_metadata is not None and ckpt_metadata_create_path is not None:
            raise ValueError("pass prepared_metadata or ckpt_metadata_create_path, not both")
        path = ckpt_metadata_create_path if prepared_metadata is None else prepared_metadata.path
        self.prepared = prepared_metadata
        self._file = None if path is None else PreparedFile(path)
        # Kept: a job whose group is destroyed under a save has an error, and not as many jobs of one rank.
        self._wrapper = DistWrapper(process_group, dist.is_initialized(), 0)
        self._on_drift = on_drift
        self._uneven = uneven
        self._fingerprint = fingerprint or Fingerprint(ckpt_format="fsdp_dtensor")
        self._thread_count = thread_count
        self._use_cpu_shm = use_cpu_shm
        self._on_commit = on_commit
        self._known: KnownPlan | None = None
        self._probed: Writer | None = None
        self._queue: AsyncSaveQueue | None = None
        self.mode = self._start(async_save, settings, start_writer, timeout) if mode is None else mode

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; what is in flight is given up if there is an error."""
        self.close(abort=error is not None)

    def save(self, state_dict: StateDict, checkpoint_dir: str | os.PathLike[str]) -> StartedSave | FinishedSave:
        """Save. Called on all ranks; no collectives before it returns if it follows a layout and is asynchronous.

        Without a layout: one gather_object and one scatter_object_list. A save that follows a layout and that this rank
        cannot plan is voted down when it is finalized, on every rank.

        Args:
            state_dict: flat or nested, of DTensors, tensors and objects. Plain tensors and objects must be equal on all
                ranks that have them: one rank's are saved. If it is a function, what that raises fails the save, on
                every rank, as any value does that this rank cannot save.
            checkpoint_dir: made if it is not there.

        Raises:
            SaveFailedError: on every rank: a plan could not be made together, or a synchronous save failed.
        """
        directory = os.fspath(checkpoint_dir)
        if not self.mode.asynchronous:
            return self.save_now(state_dict, directory)
        if self._queue is None:
            raise ConfigurationError("this saver has no queue: pass what request() returns to yours")
        ending = Ending()

        def ended(committed: Committed) -> None:
            ending.finished = FinishedSave(directory=directory, mode=self.mode, committed=committed)

        with self._results_in_answer():
            request = self._request(state_dict, directory, ended)
        index = self._queue.schedule_async_request(request)
        return StartedSave(directory=directory, mode=self.mode, index=index, ending=ending, saver=self)

    def save_now(
        self, state_dict: StateDict, checkpoint_dir: str | os.PathLike[str], *, number: int = 0, on_host: bool = False
    ) -> FinishedSave:
        """Save synchronously, whatever the mode is. Called on all ranks; collectives and errors as for ``save``.

        Args:
            state_dict: as for ``save``.
            checkpoint_dir: as for ``save``.
            number: of the save; ranks that give different ones raise.
            on_host: whether all tensors are in host memory.
        """
        wrapper, directory = self._wrapper, os.fspath(checkpoint_dir)
        writer = SynchronousWriter(directory, thread_count=self._thread_count, owner=wrapper.rank, on_host=on_host)
        planned = self._planned(state_dict, directory, wrapper, writer, writer.write)
        commit = self._commit(writer, planned, wrapper, lambda committed: None)
        return FinishedSave(directory=directory, mode=self.mode, committed=commit_now(commit, wrapper, number=number))

    def request(
        self, state_dict: StateDict, checkpoint_dir: str | os.PathLike[str], *, results_in_answer: bool = False
    ) -> Any:
        """Plan a save and return NVRx's request to write and finalize it, for a queue of the caller's.

        Called on all ranks; collectives and errors as for ``save``. Only if ``mode.asynchronous``.

        Args:
            state_dict: as for ``save``.
            checkpoint_dir: as for ``save``.
            results_in_answer: whether that queue is an ``AsyncSaveQueue``.
        """
        with self._results_in_answer() if results_in_answer else contextlib.nullcontext():
            return self._request(state_dict, os.fspath(checkpoint_dir), lambda committed: None)

    def finalize(self, *, blocking: bool = False) -> list[int]:
        """Finalize what is written. Called on all ranks: one MIN all_reduce a poll while saves are in flight.

        Returns:
            Numbers of the saves that are finalized.

        Raises:
            SaveFailedError: on every rank: a save failed.
        """
        return [] if self._queue is None else self._queue.maybe_finalize_async_calls(blocking=blocking)

    def close(self, *, abort: bool = False) -> None:
        """Finalize what is in flight and end the writer process. Safe to call twice.

        Called on all ranks unless ``abort``: then nothing is finalized.

        Raises:
            SaveFailedError: on every rank, of the first save that failed; all is closed.
        """
        own, self._queue = self._queue, None
        probed, self._probed = self._probed, None
        if probed is not None:
            probed.close()
        if own is not None:
            own.close(abort=abort)

    def _start(
        self,
        async_save: bool,
        settings: Callable[[], WorkerSettings] | None,
        start_writer: Callable[[WorkerSettings, timedelta], Writer],
        timeout: timedelta | None,
    ) -> Mode:
        facts, writer = find_facts(async_save=async_save), None
        if async_save and not dist.is_initialized():
            facts = replace(facts, problem="torch.distributed is not initialised")
        settings = settings or self._worker_settings
        limit = timeout or DEFAULT_TIMEOUT
        if decide_mode(facts).asynchronous:
            writer, problem = probed_writer(start_writer, settings(), limit)
            facts = replace(facts, problem=problem)
        mode = agree_on_mode(decide_mode(facts), self._wrapper)
        if not mode.asynchronous:
            if writer is not None:
                writer.close()
            return mode
        from megatron_ckpt_ext.commit.queue import AsyncSaveQueue

        self._probed = writer

        def start(settings: WorkerSettings, timeout: timedelta) -> Writer:
            started, self._probed = self._probed, None
            return started if started is not None and started.usable else start_writer(settings, timeout)

        self._queue = AsyncSaveQueue(settings, timeout=limit, start_writer=start)
        return mode

    def _worker_settings(self) -> WorkerSettings:
        on_cuda = torch.cuda.is_available() and not self._use_cpu_shm
        return WorkerSettings(rank=self._wrapper.rank, cuda_device=torch.cuda.current_device() if on_cuda else None)

    def _plan(self, state_dict: StateDict, directory: str, wrapper: Any) -> PlannedSave:
        def plain() -> dict[str, Any]:
            made = state_dict() if callable(state_dict) else state_dict
            return {key: each.state_dict() if isinstance(each, Stateful) else each for key, each in made.items()}

        planned, self._known = plan_dtensors(
            plain, wrapper, directory=directory, prepared=self.prepared, uneven=self._uneven, known=self._known
        )
        return planned

    def _planned(self, state_dict: StateDict, directory: str, wrapper: Any, writer: Any, write: Any) -> PlannedSave:
        """Plan, and hand what is to be written to ``write``; what goes wrong on this rank alone becomes its vote."""
        try:
            planned = self._plan(state_dict, directory, wrapper)
            plan = writer.prepare_decentralized_global_plan(writer.prepare_local_plan(planned.local_plan))
            write(planned.planner.finish_plan(plan), planned.planner)
            planned.planner.release()
        except ExchangeError as error:
            self._ended(None)
            raise WriteFailedError(error.causes) from None
        except ERRORS as error:  # the peers have planned: this rank has to vote, not to leave
            logger.exception("Rank %d cannot plan its part of %s.", wrapper.rank, directory)
            return failed_save(error, self.prepared)
        return planned

    def _request(self, state_dict: StateDict, directory: str, ended: Callable[[Committed], None]) -> Any:
        from megatron_ckpt_ext.compat.nvrx import AsyncRequest, FileSystemWriterAsync, save_function

        wrapper = self._wrapper
        writer = FileSystemWriterAsync(
            directory, thread_count=self._thread_count, use_cpu_shm_for_gpu_tensors=self._use_cpu_shm
        )
        made: list[Any] = []

        def write(plan: Any, planner: Any) -> None:
            writer.prepare_write_data(plan, planner)
            made.extend(save_function(writer))

        planned = self._planned(state_dict, directory, wrapper, writer, write)
        function, preload, arguments = made if planned.failure is None else (None, None, [])
        commit = self._commit(writer if planned.failure is None else None, planned, wrapper, ended)
        return AsyncRequest(function or write_nothing, arguments, [commit], async_fn_kwargs={}, preload_fn=preload)

    def _results_in_answer(self) -> contextlib.AbstractContextManager[None]:
        """Where an ``AsyncSaveQueue`` is in charge: nothing starts a process for the results of writers."""
        from megatron_ckpt_ext.compat.nvrx import results_through

        return results_through(queue.SimpleQueue())

    def _commit(
        self, writer: Any, planned: PlannedSave, wrapper: Any, ended: Callable[[Committed], None]
    ) -> SaveCommit:
        def on_commit(committed: Committed) -> None:
            ended(committed)
            if self._on_commit is not None:
                self._on_commit(committed)

        return SettlingCommit(
            writer,
            planned,
            wrapper,
            fingerprint=replace(
                self._fingerprint, world_size=wrapper.get_world_size(), workers_per_rank=self._thread_count
            ),
            file=self._file,
            on_drift=self._on_drift,
            on_end=self._ended,
            on_commit=on_commit,
            uneven=self._sharded() if self._uneven else None,
        )

    def _sharded(self) -> list[Entry]:
        """What the plan that was just made has of sharded tensors."""
        return [] if self._known is None else [each for each in self._known.holdings.entries if each.is_sharded]

    def _ended(self, committed: Committed | None) -> None:
        self.prepared = None if committed is None else committed.prepared


def save_fsdp_dtensor(
    state_dict: StateDict,
    checkpoint_dir: str | os.PathLike[str],
    *,
    saver: FsdpDtensorSaver | None = None,
    **settings: Any,
) -> StartedSave | FinishedSave:
    """Save a state dict of DTensors, asynchronously where that is possible. Called on all ranks.

    A job that saves more than once builds a ``FsdpDtensorSaver`` before training and passes it in: it carries the
    layout from save to save, and its writer process stays.

    Args:
        state_dict: flat or nested, of DTensors, tensors and objects.
        checkpoint_dir: made if it is not there.
        saver: of the job.
        **settings: of ``FsdpDtensorSaver``, if there is none.

    Returns:
        A started save, which ``wait`` finalizes; or a finished one, if asynchronous saves were not asked for or are not
        possible: then one warning says why.

    Raises:
        SaveFailedError: on every rank, as ``FsdpDtensorSaver.save``.
        ValueError: both a saver and its settings.
    """
    if saver is not None:
        if settings:
            raise ValueError(f"pass {', '.join(settings)} to the saver that was passed in, not beside it")
        return saver.save(state_dict, checkpoint_dir)
    own = FsdpDtensorSaver(**settings)
    try:
        saved = own.save(state_dict, checkpoint_dir)
    except BaseException:
        own.close(abort=True)
        raise
    return replace(saved, owns_saver=True) if isinstance(saved, StartedSave) else saved
