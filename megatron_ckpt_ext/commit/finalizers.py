"""What Megatron hangs on a save, its tracker, loggers and clean-up: when they run, and what if one fails."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megatron_ckpt_ext.commit.commit import SaveCommit
from megatron_ckpt_ext.compat.dcp import ERRORS
from megatron_ckpt_ext.compat.mcore import (
    ends_in_a_barrier,
    is_collective_finalizer,
    is_optional_finalizer,
    writes_metadata_json,
)

__all__ = ["Finalizers", "report"]

logger = logging.getLogger(__name__)


class Finalizers:
    """The finalizers of one save on this rank, in the order in which they were added; the commit apart."""

    def __init__(self, finalizers: Sequence[Callable[[], Any]], commit: SaveCommit | None) -> None:
        """Sort out what is left to do beside ``commit``, which also does what Megatron needs a barrier for."""
        self._commit = commit
        self._rest = [
            fn for fn in finalizers if fn is not commit and not (commit is not None and writes_metadata_json(fn))
        ]

    @property
    def need_all_ranks(self) -> bool:
        """Whether they hold collectives, so that they may only run once all ranks know that the save was published."""
        return self._commit is not None and any(map(is_collective_finalizer, self._rest))

    def run_unconfirmed(self, *, is_coordinator: bool) -> None:
        """Run what belongs to the publishing of the save: on the coordinator, or on all ranks without a commit of ours.

        The other ranks do not know yet that it was published. The tracker comes late among them, so what comes behind
        one that fails does not run; those that only tell a logger do not count.

        Raises:
            BaseException: of the one that failed.
        """
        if self._commit is None or (is_coordinator and not self.need_all_ranks):
            self._run()

    def run_confirmed(self, *, is_coordinator: bool) -> None:
        """Run the others, once all ranks know that the save was published; raises as ``run_unconfirmed``."""
        if self._commit is not None and (self.need_all_ranks or not is_coordinator):
            self._run()

    def _run(self) -> None:
        for place, finalizer in enumerate(self._rest):
            try:
                finalizer()
            except ERRORS as error:
                if is_optional_finalizer(finalizer):
                    report(error)
                    continue
                for _ in filter(ends_in_a_barrier, self._rest[place:]):
                    dist.barrier()  # the other ranks are in it, and hear of the error afterwards
                raise


def report(error: BaseException) -> None:
    """Log what failed and costs nothing."""
    logger.error("The checkpoint is published, but what follows it failed on this rank: %r.", error, exc_info=error)
