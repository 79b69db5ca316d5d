"""The process groups of a manager."""

from datetime import timedelta

import torch.distributed as dist

from megatron_ckpt_ext.compat.dcp import DistWrapper

__all__ = ["OwnGroup"]


class OwnGroup:
    """A gloo group that nobody else uses. Owns it.

    Attributes:
        group: ``None`` without torch.distributed.
        wrapper: torch's ``_DistWrapper`` of it, with coordinator 0.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        """Make it. Called on all ranks of ``group``.

        Args:
            group: all ranks of the job; ``None`` is the default group.
            timeout: how long ranks wait for each other.
        """
        self.group = _new(group, timeout) if dist.is_initialized() else None
        self.wrapper = DistWrapper(self.group, dist.is_initialized(), 0)

    def close(self) -> None:
        """Leave it. No collectives, safe to call twice."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _new(group: dist.ProcessGroup | None, timeout: timedelta) -> dist.ProcessGroup | None:
    ranks = None if group is None else dist.get_process_group_ranks(group)
    # A group of some ranks is made by these alone.
    made = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=ranks is not None)
    return made if isinstance(made, dist.ProcessGroup) else None
