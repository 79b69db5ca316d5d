"""``CheckpointManager``: checkpoints of plain PyTorch and FSDP2 trainers, from the first save to the resume."""

import atexit
import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from megatron_ckpt_ext.commit.commit import OnDrift
from megatron_ckpt_ext.commit.failures import SaveFailedError
from megatron_ckpt_ext.compat.dcp import DistWrapper
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.manager.accounting import Accounting, Save
from megatron_ckpt_ext.manager.afterwards import Afterwards, policy_of
from megatron_ckpt_ext.manager.config import ManagerConfig
from megatron_ckpt_ext.manager.engine import Engine, Kit
from megatron_ckpt_ext.manager.inline_engine import InlineEngine
from megatron_ckpt_ext.manager.order import StepOrder
from megatron_ckpt_ext.manager.process_engine import ProcessEngine
from megatron_ckpt_ext.manager.progress import ProgressDisplay
from megatron_ckpt_ext.manager.resume import Chosen, choose_step, load_step
from megatron_ckpt_ext.manager.start import start
from megatron_ckpt_ext.manager.thread_engine import ThreadEngine
from megatron_ckpt_ext.publish.steps import StepPaths
from megatron_ckpt_ext.staging.memory import Allocator
from megatron_ckpt_ext.staging.stage import HostStager
from megatron_ckpt_ext.strategy.fsdp_dtensor import FsdpDtensorSaver

__all__ = ["CheckpointManager"]

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, keeps and loads the checkpoints ``step_N`` of one directory. At most one save is in flight.

    Owns what writes, its process groups and its host memory; ``close`` ends them, and the end of the process does.
    Methods are called on all ranks, in the same order, on one thread of each.

    Attributes:
        directory: of the checkpoints.
        config: how they are saved.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        config: ManagerConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        on_saved: Callable[[int], None] | None = None,
        allocator: Allocator | None = None,
        **settings: Any,
    ) -> None:
        """Decide how to save. Called on all ranks: one MIN all_reduce; removes and writes no checkpoint.

        Args:
            directory: of the checkpoints; made if it is not there.
            config: how to save.
            process_group: all ranks of the job; by default the default group, or, without one, this process.
            on_saved: called with a step once it is durable, on every rank, on the thread that finds out: with a
                background thread it is that one, so no collectives there. What it raises is logged.
            allocator: of host memory for staging.
            **settings: of ``ManagerConfig``, in place of ``config``.

        Raises:
            ConfigurationError: on every rank: settings or prepared metadata that cannot be.
        """
        if config is not None and settings:
            raise ConfigurationError(f"pass {', '.join(settings)} in the config that was passed in, not beside it")
        self.directory = os.fspath(directory)
        self.config = config or ManagerConfig(**settings)
        self._group = process_group
        self._allocator = allocator
        self._wrapper = DistWrapper(process_group, dist.is_initialized(), 0)
        paths = StepPaths(self.directory, self.config.subdirectory)
        started = start(paths, self.config, process_group, self._wrapper)
        self._fingerprint, self._prepared = started.fingerprint, started.finding.prepared
        self._accounting = Accounting(started.log, counting=self.config.events is not None)
        self._display = ProgressDisplay(enabled=self.config.progress and self._wrapper.is_coordinator)
        self._order = StepOrder(paths, self._wrapper)
        policy = policy_of(self.config) if self._wrapper.is_coordinator else None
        self._afterwards = Afterwards(paths, policy, on_saved, self._accounting)
        self._engine: Engine | None = None
        self._saving: Save | None = None
        self._fenced = self._closed = False

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error without the other ranks' trainers, which may go on."""
        if error is None:
            self.close()
        else:
            self._leave(failed=True)

    def save(self, step: int, state_dict: Mapping[str, Any]) -> None:
        """Save ``state_dict`` as ``step``; the state dict is read now, and again at the next save.

        Called on all ranks. Waits for the save before it, and, unless saves are asynchronous, for this one. An
        asynchronous save has no collectives on this thread, the first one apart: that makes groups and agrees on room.
        CPU tensors may be changed when it returns, tensors of a GPU after ``wait_for_staging``.

        Args:
            step: the same on all ranks, and larger than any that this manager has saved or loaded. The newest one again
                is not saved twice.
            state_dict: flat or nested, of DTensors, tensors, objects and what has a ``state_dict``. Plain tensors and
                objects must be equal on all ranks that have them: one rank's are saved.

        Raises:
            SaveFailedError: on every rank: the save before this one, or this one, failed. After the former nothing of
                this one has begun: call it again.
            ConfigurationError: a step that is not larger, or a first one that is complete in the directory already.
            RuntimeError: the manager is closed.
        """
        self.wait()
        if self._closed:
            raise RuntimeError(f"the checkpoint manager of {self.directory} is closed: make another one")
        path = self._order.place(step)
        if path is None:
            return
        if self._engine is None:
            self._engine = self._new_engine()
        self._saving, self._fenced = Save(step=step, path=path), False
        try:
            self._engine.start(self._saving, state_dict)
        except BaseException:
            self._saving = None
            raise
        self._be_first_at_exit()
        if not self.config.async_save:
            self.wait()

    def wait_for_staging(self) -> None:
        """Call this right before the optimizer's step: tensors of the GPU may be changed afterwards.

        Makes the current CUDA stream wait for the copies, not the caller. No collectives.
        """
        if self._engine is None or self._saving is None:
            return
        began = time.monotonic()
        self._engine.fence()
        if not self._fenced:  # later ones have nothing to wait for, and there is one in each step
            self._fenced = True
            self._accounting.fenced(self._saving, began)

    def poll(self) -> bool:
        """Return whether nothing is in flight. Called on all ranks: one MIN all_reduce while something is.

        Raises:
            SaveFailedError: on every rank, once: the save failed.
        """
        return self._settle(lambda engine: engine.poll())

    def wait(self) -> None:
        """Wait until the save in flight is durable. Called on all ranks: one MIN all_reduce if one is in flight.

        Raises:
            SaveFailedError: on every rank, once: the save failed.
        """
        self._settle(_waited)

    def latest_complete_step(self) -> int | None:
        """Return the newest complete step. Called on all ranks: one broadcast, one MIN all_reduce.

        Raises:
            ConfigurationError: on every rank: a rank does not see it.
        """
        chosen = self._choose(None)
        return None if chosen is None else chosen.step

    def load(self, state_dict: dict[str, Any], step: int | None = None) -> int | None:
        """Load a step into ``state_dict``, in place. Called on all ranks: torch's ``load`` and two small collectives.

        Args:
            state_dict: of what is to be filled; each of its keys must be in the checkpoint.
            step: which; ``None``: the newest complete one.

        Returns:
            The step; ``None`` if none was asked for and none is complete.

        Raises:
            ConfigurationError: on every rank: the step that was asked for is not complete, or a rank does not see it.
            LoadFailedError: on every rank: it cannot be read, or a key is missing; what was filled by then stays so.
            SaveFailedError: on every rank: the save in flight, which is waited for, failed; nothing was loaded.
        """
        self.wait()
        chosen = self._choose(step)
        if chosen is None:
            return None
        with self._display.loading(chosen.path):
            load_step(state_dict, chosen, self._wrapper)
        self._order.newest = chosen.step
        self._afterwards.resumed(chosen.step)
        return chosen.step

    def close(self) -> None:
        """Wait for the save in flight and end everything. Called on all ranks. Safe to call twice.

        Raises:
            SaveFailedError: on every rank: that save failed; all is closed.
        """
        try:
            self.wait()
        finally:
            self._end()

    def _leave(self, *, failed: bool) -> None:
        """Close without asking the other ranks; what goes wrong is logged."""
        try:
            if self._engine is not None:
                self._engine.leave(failed=failed)
        except Exception:
            logger.exception("The last checkpoint in %s was not saved.", self.directory)
        finally:
            self._end()

    def _end(self) -> None:
        self._closed, self._saving = True, None
        atexit.unregister(self._close_at_exit)
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._accounting.close()

    def _be_first_at_exit(self) -> None:
        # What was registered last runs first, and a queue, made in the first save, gives up what is in flight.
        atexit.unregister(self._close_at_exit)
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        self._leave(failed=False)

    def _saver(self, **settings: Any) -> FsdpDtensorSaver:
        return FsdpDtensorSaver(
            prepared_metadata=self._prepared,
            ckpt_metadata_create_path=self.config.ckpt_metadata if self._prepared is None else None,
            on_drift=OnDrift(self.config.ckpt_metadata_on_drift),
            fingerprint=self._fingerprint,
            thread_count=self.config.files_per_rank,
            timeout=timedelta(seconds=self.config.save_timeout),
            **settings,
        )

    def _new_engine(self) -> Engine:
        kit = Kit(
            saver=self._saver,
            durable=self._afterwards.durable,
            accounting=self._accounting,
            display=self._display,
            timeout=timedelta(seconds=self.config.save_timeout),
        )
        if not self.config.async_save:
            return InlineEngine(kit, self._group)
        if self.config.writer == "process":
            return ProcessEngine(kit, self._group)
        return ThreadEngine(kit, self._group, HostStager(limit=self.config.staging_limit, allocator=self._allocator))

    def _settle(self, ended: Callable[[Engine], bool]) -> bool:
        """Ask the engine; once the save in flight has ended well it is the newest."""
        if self._engine is None or self._saving is None:
            return True
        try:
            if not ended(self._engine):
                return False
        except SaveFailedError:
            if self._engine.is_broken:
                self._order.given_up = self._saving.step
                self._discard(self._engine)
            self._saving = None
            raise
        self._order.newest, self._saving = self._saving.step, None
        return True

    def _discard(self, engine: Engine) -> None:
        """Let the next save have another one."""
        self._engine = None
        engine.close()

    def _choose(self, step: int | None) -> Chosen | None:
        return choose_step(self.directory, subdirectory=self.config.subdirectory, step=step, wrapper=self._wrapper)


def _waited(engine: Engine) -> bool:
    engine.wait()
    return True
