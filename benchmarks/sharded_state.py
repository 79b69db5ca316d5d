"""On real ranks: the sharded state dict that the benchmarks save."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from sides import State

__all__ = ["SavedState"]


class SavedState:
    """What one rank holds: tensors of its own, replicas of tensors that every rank has, objects, and plain values.

    The tensors stay the same from save to save, as those of a model do; only their values change.
    """

    def __init__(self, state: State, prefix: str = "") -> None:
        """Make the tensors; ``prefix`` begins all names."""
        self._state = state
        self._prefix = prefix
        self._own = [torch.randn(state.elements) for _ in range(state.tensors)]
        self._shared = [torch.ones(state.elements) for _ in range(state.replicated)]

    def sharded(self, step: int) -> dict[str, Any]:
        """Build the sharded state dict of one save. No collectives."""
        rank, world = dist.get_rank(), dist.get_world_size()
        content: dict[str, Any] = {"iteration": step, "args": {f"argument_{n}": n for n in range(self._state.items)}}
        for number, data in enumerate(self._own):
            name = f"{self._prefix}optimizer.exp_avg.decoder.layers.{number}.weight"
            content[name] = ShardedTensor.from_rank_offsets(name, data.add_(1), (0, rank, world))
        for number, data in enumerate(self._shared):
            name = f"{self._prefix}decoder.layers.{number}.weight"
            content[name] = ShardedTensor.from_rank_offsets(name, data.add_(1), replica_id=rank)
        for number in range(self._state.items):
            name = f"{self._prefix}decoder.layers.{number}._extra_state"
            content[name] = ShardedObject(name, {"amax": torch.randn(64), "step": step}, (world,), (rank,))
        return content
