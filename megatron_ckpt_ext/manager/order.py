"""Which step a manager may save next: steps go up, and no complete checkpoint is written over."""

import logging
import os
from typing import Any

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.publish.completeness import verify_checkpoint
from megatron_ckpt_ext.publish.steps import StepPaths

__all__ = ["StepOrder"]

logger = logging.getLogger(__name__)


class StepOrder:
    """The order of the steps of one manager.

    Attributes:
        newest: the step that was saved or loaded last; ``None`` before that.
        given_up: the step whose writer may still be writing, -1 if there is none.
    """

    def __init__(self, paths: StepPaths, wrapper: Any) -> None:
        """Know nothing yet.

        Args:
            paths: of the steps.
            wrapper: torch's ``_DistWrapper`` of all ranks.
        """
        self._paths = paths
        self._wrapper = wrapper
        self.newest: int | None = None
        self.given_up = -1

    def place(self, step: int) -> str | None:
        """Return where to save ``step``; ``None``, with a warning, if it is the newest already.

        Called on all ranks; one broadcast while nothing was saved or loaded.

        Raises:
            ConfigurationError: on every rank: the step may not be saved.
        """
        path = self._paths.path(step)
        if (refusal := self._refusal(step, path)) is not None:
            raise ConfigurationError(f"step {step} cannot be saved in {self._paths.directory}: {refusal}")
        if step == self.newest:
            if self._wrapper.is_coordinator:
                logger.warning("Step %d is saved already, in %s: it is not saved again.", step, path)
            return None
        return path

    def _refusal(self, step: int, path: str) -> str | None:
        if step <= self.given_up:
            return f"the save of step {self.given_up} was given up, and may still be being written. Save a later step"
        if self.newest is not None and step < self.newest:
            return f"steps go up, and the newest here is {self.newest}. Save a later step, or use another directory"
        if os.path.islink(path) or os.path.islink(self._paths.parent(step)):
            return f"{path} is a link, to what is somebody else's. Save another step, or use another directory"
        if self.newest is None and self._wrapper.broadcast_object(self._is_complete(path)):
            return (
                f"{path} is a complete checkpoint of an earlier job. Load a step first, save a later one, or use "
                "another directory"
            )
        return None

    def _is_complete(self, path: str) -> bool | None:
        """Whether rank 0 finds a complete checkpoint there."""
        return verify_checkpoint(path).complete if self._wrapper.is_coordinator else None
