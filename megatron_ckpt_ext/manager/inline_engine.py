"""Saves that the trainer writes itself."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from megatron_ckpt_ext.events import Phase
from megatron_ckpt_ext.manager.accounting import Save
from megatron_ckpt_ext.manager.engine import Kit

__all__ = ["InlineEngine"]


class InlineEngine:
    """The trainer writes, and waits."""

    is_broken = False

    def __init__(self, kit: Kit, group: dist.ProcessGroup | None) -> None:
        """Build the saver. Called on all ranks: one MIN all_reduce."""
        self._kit = kit
        self._saver = kit.saver(process_group=group, async_save=False)

    def start(self, save: Save, state_dict: Mapping[str, Any]) -> None:
        """Save it whole."""
        with self._kit.accounting.counting(save, Phase.WRITE):
            finished = self._saver.save_now(state_dict, save.path, number=save.step)
        self._kit.accounting.written(save, save.started)
        self._kit.durable(save, finished.committed)

    def fence(self) -> None:
        """Nothing is being copied."""

    def poll(self) -> bool:
        """Nothing is ever in flight."""
        return True

    def wait(self) -> None:
        """Nothing is ever in flight."""

    def leave(self, *, failed: bool) -> None:
        """Nothing is ever in flight."""

    def close(self) -> None:
        """End the saver."""
        self._saver.close()
