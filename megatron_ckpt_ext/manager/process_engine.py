"""Saves that NVRx's writer process writes."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from megatron_ckpt_ext.commit.failures import SaveFailedError
from megatron_ckpt_ext.events import Phase
from megatron_ckpt_ext.manager.accounting import Save
from megatron_ckpt_ext.manager.engine import Kit
from megatron_ckpt_ext.manager.groups import OwnGroup
from megatron_ckpt_ext.strategy.fsdp_dtensor import FinishedSave, StartedSave

__all__ = ["ProcessEngine"]


class ProcessEngine:
    """NVRx's writer process writes, behind our queue; what is written is finalized when the trainer polls or waits."""

    is_broken = False

    def __init__(self, kit: Kit, group: dist.ProcessGroup | None) -> None:
        """Make group, saver, queue and process. Called on all ranks: a new group, one MIN all_reduce.

        If that cannot be, saves are synchronous, after one warning.
        """
        self._kit = kit
        self._own = OwnGroup(group, kit.timeout)
        self._saver = kit.saver(process_group=self._own.group, async_save=True)
        self._flying: tuple[Save, StartedSave] | None = None

    def start(self, save: Save, state_dict: Mapping[str, Any]) -> None:
        """Hand it to the process, or save it whole."""
        with self._kit.accounting.counting(save, Phase.STAGE):
            saved = self._saver.save(state_dict, save.path)
        if isinstance(saved, StartedSave):
            self._flying = save, saved
            self._kit.accounting.staged(save, items=0, bytes=0)
            return
        self._kit.accounting.fell_back(save, saved.mode.reason)
        self._ended(save, saved)

    def fence(self) -> None:
        """The process has its copy when ``save`` returns."""

    def poll(self) -> bool:
        """One MIN all_reduce while a save is in flight, a second one to confirm that it is published."""
        if self._flying is None:
            return True
        try:
            with self._kit.accounting.counting(self._flying[0], Phase.WRITE):
                done = bool(self._saver.finalize())
        except SaveFailedError:
            self._flying = None
            raise
        if done:
            self.wait()
        return done

    def wait(self) -> None:
        """One MIN all_reduce a poll."""
        if self._flying is None:
            return
        save, started = self._flying
        try:
            with self._kit.accounting.counting(save, Phase.WRITE):
                finished = started.wait()
        except SaveFailedError:
            self._flying = None
            raise
        self._flying = None
        self._ended(save, finished)

    def leave(self, *, failed: bool) -> None:
        """Publish with all ranks, or give it up."""
        if not failed:
            self.wait()
        elif self._flying is not None:
            self._flying = None
            self._saver.close(abort=True)

    def close(self) -> None:
        """End queue and process."""
        self._saver.close()
        self._own.close()

    def _ended(self, save: Save, finished: FinishedSave) -> None:
        self._kit.accounting.written(save, save.started)
        self._kit.durable(save, finished.committed)
