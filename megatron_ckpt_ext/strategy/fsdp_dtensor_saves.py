"""What a save returns: it has ended, or it can be waited for."""

from dataclasses import dataclass
from typing import Protocol

from megatron_ckpt_ext.commit.commit import Committed
from megatron_ckpt_ext.commit.failures import WriteFailedError
from megatron_ckpt_ext.strategy.fsdp_dtensor_mode import Mode

__all__ = ["Ending", "FinishedSave", "Saver", "StartedSave"]


class Saver(Protocol):
    """Who started a save."""

    def finalize(self, *, blocking: bool = False) -> list[int]:
        """Finalize what is written. Called on all ranks."""

    def close(self, *, abort: bool = False) -> None:
        """End what belongs to it. Called on all ranks unless ``abort``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedSave:
    """A checkpoint that is published."""

    directory: str
    """Of the checkpoint."""
    mode: Mode
    """How it was saved, and why so."""
    committed: Committed
    """How it got its layout, and the layout that the next save can follow."""

    def wait(self) -> "FinishedSave":
        """Return itself: there is nothing to wait for. No collectives."""
        return self


@dataclass(slots=True)
class Ending:
    """How a started save ended; filled when it is finalized."""

    finished: FinishedSave | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedSave:
    """A save that is being written; the trainer may change its tensors again."""

    directory: str
    """Of the checkpoint."""
    mode: Mode
    """How it is saved."""
    index: int
    """Its number in the queue."""
    ending: Ending
    """How it ended."""
    saver: Saver
    """Who finalizes it."""
    owns_saver: bool = False
    """Whether ``wait`` also closes the saver."""

    def wait(self) -> FinishedSave:
        """Finalize this save and those before it. Called on all ranks: one MIN all_reduce a poll.

        Raises:
            SaveFailedError: on every rank: it could not be written, or may not be published.
        """
        try:
            if self.ending.finished is None:
                self.saver.finalize(blocking=True)
            if self.ending.finished is None:
                raise WriteFailedError({0: f"the save to {self.directory} failed, as was raised before"})
            return self.ending.finished
        finally:
            if self.owns_saver:
                self.saver.close()
