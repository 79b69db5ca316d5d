"""``PreparedSaveWrapper``: Megatron's fully-parallel save, distributed as the prepared metadata says.

Megatron distributes the replicas of a shard over the ranks by exchanging what everybody holds. The layout already says
who writes what, so nothing needs to be exchanged.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ckpt_ext.compat.mcore import FullyParallelSaveStrategyWrapper, ShardedTensor, nested_values
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

__all__ = ["PreparedSaveWrapper", "distribute_from_slice"]


class PreparedSaveWrapper(FullyParallelSaveStrategyWrapper):  # type: ignore[misc]  # megatron is untyped
    """A ``FullyParallelSaveStrategyWrapper`` around a ``PreparedSaveStrategy``.

    Synchronous saves, and those that follow no layout, are distributed by Megatron's exchange: only a save that votes
    may trust a layout.
    """

    base_strategy: PreparedSaveStrategy

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, async_strategy: str = "nvrx") -> Any:
        """Distribute and plan a save. Called on all ranks; no collectives while it follows a prepared metadata."""
        base = self.base_strategy
        if base.handles(async_strategy):
            if base.prepared is not None:
                return base.request(sharded_state_dict, checkpoint_dir, distribute_from_slice)
            # A distribution cached in an earlier save does not know what has been added since.
            self.cached_distribution = None
        return super().async_save(sharded_state_dict, checkpoint_dir, async_strategy)


def distribute_from_slice(sharded_state_dict: Mapping[str, Any], prepared: PreparedMetadata) -> None:
    """Set replica ids so that each shard is written by the rank whose slice has it. No collectives.

    A shard that the layout does not know keeps its replica id: by Megatron's invariant exactly one rank has it as main
    replica, so it is written once, and the rank reports drift.

    Args:
        sharded_state_dict: changed in place; objects keep their replica ids, as in Megatron's own distribution.
        prepared: the layout.
    """
    known, own = prepared.known_items, prepared.slice.locators
    for entry in nested_values(sharded_state_dict):
        if isinstance(entry, ShardedTensor):
            item = (entry.key, tuple(entry.global_offset))  # equals an Item, and there are many
            if item in known:
                entry.replica_id = 0 if item in own else 1
