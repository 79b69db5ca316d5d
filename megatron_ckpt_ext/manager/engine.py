"""What writes the saves of a manager."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from megatron_ckpt_ext.commit.commit import Committed
from megatron_ckpt_ext.manager.accounting import Accounting, Save
from megatron_ckpt_ext.manager.progress import ProgressDisplay
from megatron_ckpt_ext.strategy.fsdp_dtensor import FsdpDtensorSaver

__all__ = ["Engine", "Kit"]


class Engine(Protocol):
    """Writes one save after the other; at most one is in flight."""

    is_broken: bool
    """Whether it can write no other save, the same on all ranks."""

    def start(self, save: Save, state_dict: Mapping[str, Any]) -> None:
        """Begin a save; none is in flight. Called on all ranks."""

    def fence(self) -> None:
        """Make the trainer's stream wait until the state of the save in flight is copied. No collectives."""

    def poll(self) -> bool:
        """Whether nothing is in flight any more, the same on all ranks. Called on all ranks.

        Raises:
            SaveFailedError: on every rank: the save that was in flight failed.
        """

    def wait(self) -> None:
        """Wait until nothing is in flight. Called on all ranks. Raises as ``poll``."""

    def leave(self, *, failed: bool) -> None:
        """End what is in flight because the trainer ends; raises as this rank sees it.

        Args:
            failed: whether only this rank's trainer may be ending: then nothing is waited for that needs the others'.
        """

    def close(self) -> None:
        """End what belongs to it; what is in flight is finished first. Safe to call twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kit:
    """What the engines of a manager share."""

    saver: Callable[..., FsdpDtensorSaver]
    """Builds the saver, given ``process_group`` and ``async_save``."""
    durable: Callable[[Save, Committed], None]
    """Called on each rank once a save is published."""
    accounting: Accounting
    """Where the time goes."""
    display: ProgressDisplay
    """Shows long writes."""
    timeout: timedelta
    """How long a save may be waited for."""
