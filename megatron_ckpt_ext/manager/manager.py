"""``CheckpointManager``: checkpoints of plain PyTorch and FSDP2 trainers, from the first save to the resume."""

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_ckpt_ext.commit.commit import Committed, OnDrift
from megatron_ckpt_ext.commit.failures import SaveFailedError
from megatron_ckpt_ext.compat.dcp import DistWrapper
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.events import EventLog
from megatron_ckpt_ext.manager.accounting import Accounting, Save
from megatron_ckpt_ext.manager.config import ManagerConfig
from megatron_ckpt_ext.manager.engine import Engine, Kit
from megatron_ckpt_ext.manager.inline_engine import InlineEngine
from megatron_ckpt_ext.manager.process_engine import ProcessEngine
from megatron_ckpt_ext.manager.progress import ProgressDisplay
from megatron_ckpt_ext.manager.resume import Chosen, choose_step, load_step
from megatron_ckpt_ext.manager.thread_engine import ThreadEngine
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.publish.completeness import verify_checkpoint
from megatron_ckpt_ext.publish.judge import RememberingJudge
from megatron_ckpt_ext.publish.retention import KeepAny, KeepInterval, KeepLast, RetentionPolicy, retain
from megatron_ckpt_ext.publish.steps import StepPaths
from megatron_ckpt_ext.staging.memory import Allocator
from megatron_ckpt_ext.staging.stage import HostStager
from megatron_ckpt_ext.strategy.fsdp_dtensor import FsdpDtensorSaver
from megatron_ckpt_ext.strategy.startup import Action, Finding, agree_on_start, examine

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
        self._on_saved = on_saved
        self._allocator = allocator
        self._wrapper = DistWrapper(process_group, dist.is_initialized(), 0)
        self._steps = StepPaths(self.directory, self.config.subdirectory)
        self._policy = _policy_of(self.config)
        self._judge = RememberingJudge()
        _check_ranks(self.config, process_group)
        self._fingerprint = Fingerprint(
            world_size=self._wrapper.get_world_size(),
            ckpt_format="fsdp_dtensor",
            workers_per_rank=self.config.files_per_rank,
            torch_version=str(torch.__version__),
        )
        log, self._finding = self._start()
        self._accounting = Accounting(log)
        self._display = ProgressDisplay(enabled=self.config.progress and self._wrapper.is_coordinator)
        self._engine: Engine | None = None
        self._saving: Save | None = None
        self._newest: int | None = None
        self._given_up = -1
        self._abandoned: set[int] = set()
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
        self._check_step(step)
        if step == self._newest:
            if self._wrapper.is_coordinator:
                logger.warning("Step %d is saved already, in %s: it is not saved again.", step, self._steps.path(step))
            return
        if self._engine is None:
            self._engine = self._new_engine()
        self._saving, self._fenced = Save(step=step, path=self._steps.path(step)), False
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
        self._newest = chosen.step
        self._abandoned = {each for each in self._steps.steps() if each > chosen.step}
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

    def _check_step(self, step: int) -> None:
        if self._closed:
            raise RuntimeError(f"the checkpoint manager of {self.directory} is closed: make another one")
        if step <= self._given_up:
            raise ConfigurationError(
                f"step {step} cannot be saved in {self.directory}: the save of step {self._given_up} was given up, and "
                "may still be being written. Save a later step"
            )
        if self._newest is not None and step < self._newest:
            raise ConfigurationError(
                f"step {step} cannot be saved in {self.directory}: steps go up, and the newest here is {self._newest}. "
                "Save a later step, or use another directory"
            )
        path = self._steps.path(step)
        if os.path.islink(path) or os.path.islink(self._steps.parent(step)):
            raise ConfigurationError(f"step {step} cannot be saved: {path} is a link, to what is somebody else's")
        if self._newest is None and self._wrapper.broadcast_object(self._is_complete(path)):
            raise ConfigurationError(
                f"step {step} cannot be saved: {path} is a complete checkpoint of an earlier job. Load a step first, "
                "save a later one, or use another directory"
            )

    def _is_complete(self, path: str) -> bool | None:
        """Whether rank 0 finds a complete checkpoint there."""
        return verify_checkpoint(path).complete if self._wrapper.is_coordinator else None

    def _start(self) -> tuple[EventLog, Finding]:
        wrapper = self._wrapper
        with contextlib.ExitStack() as opened:
            log, finding = self._examine(wrapper)
            opened.callback(log.close)
            finding = agree_on_start(finding, self.config, self._group)
            opened.pop_all()
        if wrapper.is_coordinator:
            for warning in finding.warnings:
                logger.warning("%s.", warning)
        return log, finding

    def _examine(self, wrapper: Any) -> tuple[EventLog, Finding]:
        """Find out what this rank can do; what it cannot is a vote to stop, for the others wait in the reduction."""
        try:
            os.makedirs(self.directory, exist_ok=True)
            log = EventLog(self.config.events, wrapper.rank)
        except (OSError, ConfigurationError) as error:
            return EventLog(None, wrapper.rank), Finding(action=Action.STOP, reason=str(error))
        create = self.config.ckpt_metadata_create
        path, world_size = self.config.ckpt_metadata, wrapper.get_world_size()
        return log, examine(path, self._fingerprint, wrapper.rank, world_size, create=create)

    def _saver(self, **settings: Any) -> FsdpDtensorSaver:
        prepared = self._finding.prepared
        return FsdpDtensorSaver(
            prepared_metadata=prepared,
            ckpt_metadata_create_path=self.config.ckpt_metadata if prepared is None else None,
            on_drift=OnDrift(self.config.ckpt_metadata_on_drift),
            fingerprint=self._fingerprint,
            thread_count=self.config.files_per_rank,
            timeout=timedelta(seconds=self.config.save_timeout),
            **settings,
        )

    def _new_engine(self) -> Engine:
        kit = Kit(
            saver=self._saver,
            durable=self._durable,
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
                self._given_up = self._saving.step
                self._discard(self._engine)
            self._saving = None
            raise
        self._newest, self._saving = self._saving.step, None
        return True

    def _discard(self, engine: Engine) -> None:
        """Let the next save have another one."""
        self._engine = None
        engine.close()

    def _choose(self, step: int | None) -> Chosen | None:
        return choose_step(self.directory, subdirectory=self.config.subdirectory, step=step, wrapper=self._wrapper)

    def _durable(self, save: Save, committed: Committed) -> None:
        """Do what follows a publish; it may fail, the checkpoint stays. No collectives."""
        self._accounting.durable(save, committed)
        self._abandoned.discard(save.step)
        if self._policy is not None and self._wrapper.is_coordinator:
            self._retain(save, self._policy)
        if self._on_saved is not None:
            try:
                self._on_saved(save.step)
            except Exception:
                logger.exception("on_saved(%d) failed; the checkpoint is durable all the same.", save.step)

    def _retain(self, save: Save, policy: RetentionPolicy) -> None:
        began = time.monotonic()
        try:
            report = retain(
                self.directory,
                policy,
                finalized=save.step,
                subdirectory=self.config.subdirectory,
                abandoned=self._abandoned,
                judge=self._judge,
            )
        except Exception as error:
            logger.exception("Older checkpoints in %s were not removed.", self.directory)
            self._accounting.retained(save, began, removed=0, reason=f"{type(error).__name__}: {error}")
            return
        reason = "; ".join(f"step {step}: {why}" for step, why in report.failed.items()) or None
        self._accounting.retained(save, began, removed=len(report.removed), reason=reason)


def _waited(engine: Engine) -> bool:
    engine.wait()
    return True


def _check_ranks(config: ManagerConfig, group: dist.ProcessGroup | None) -> None:
    """Refuse a queue that would have no group, or a larger one."""
    if config.writer == "process" and not (
        dist.is_initialized() and dist.get_world_size(group) == dist.get_world_size()
    ):
        raise ConfigurationError(
            'writer "process" was given, but the manager does not have all ranks of a process group: call '
            "init_process_group before, pass no other group, or leave writer out"
        )


def _policy_of(config: ManagerConfig) -> RetentionPolicy | None:
    policies: list[RetentionPolicy] = []
    if config.keep_last is not None:
        policies.append(KeepLast(config.keep_last))
    if config.keep_interval is not None:
        policies.append(KeepInterval(config.keep_interval))
    return KeepAny(tuple(policies)) if policies else None
