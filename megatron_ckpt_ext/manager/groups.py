"""The process groups of a manager."""

from datetime import timedelta

import torch.distributed as dist

__all__ = ["OwnGroups"]

_PATIENCE = 3
"""A trainer may wait for a peer that first gives up on a save, whose writer first gave up on another one's vote."""


class OwnGroups:
    """Two gloo groups that nobody else uses, one for each thread that talks. Owns them.

    Attributes:
        writer: for who writes.
        trainer: for the trainer's thread.
        use_dist: whether there are groups at all.
        rank: of this process among the ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        """Make them. Called on all ranks of ``group``.

        Args:
            group: all ranks of the job; ``None`` is the default group.
            timeout: how long ranks wait for each other.
        """
        self.use_dist = dist.is_initialized()
        self.rank = dist.get_rank(group) if self.use_dist else 0
        self.writer = self._new(group, timeout)
        self.trainer = self._new(group, _PATIENCE * timeout)

    def close(self) -> None:
        """Leave them. No collectives, safe to call twice."""
        for group in (self.writer, self.trainer):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self.writer = self.trainer = None

    def _new(self, group: dist.ProcessGroup | None, timeout: timedelta) -> dist.ProcessGroup | None:
        if not self.use_dist:
            return None
        ranks = None if group is None else dist.get_process_group_ranks(group)
        # A group of some ranks is made by these alone.
        own = ranks is not None
        made = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=own)
        return made if isinstance(made, dist.ProcessGroup) else None
