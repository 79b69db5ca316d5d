"""Buffers that are allocated once and used again by every save."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from megatron_ckpt_ext.staging.memory import Allocator
from megatron_ckpt_ext.staging.tensors import KeyPath, Source

__all__ = ["Buffers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffer:
    memory: torch.Tensor
    """As it was allocated."""
    values: torch.Tensor
    """The same in the dtype of the source."""
    allocator: Allocator

    @classmethod
    def allocated(cls, source: Source, allocator: Allocator) -> Self:
        memory = allocator.allocate(source.nbytes)
        return cls(memory=memory, values=memory.view(source.tensor.dtype), allocator=allocator)

    def fits(self, source: Source, allocator: Allocator) -> bool:
        same_type = self.values.dtype == source.tensor.dtype and self.allocator is allocator
        return same_type and self.memory.numel() == source.nbytes

    def free(self) -> None:
        self.allocator.free(self.memory)


class Buffers:
    """One buffer for each path of a state dict. Owns them; ``close`` frees them. No collectives.

    A buffer is kept as long as there is a tensor of the same dtype, size and kind of device at its path.
    """

    def __init__(self, allocator_for: Callable[[torch.device], Allocator]) -> None:
        """Hold nothing.

        Args:
            allocator_for: returns the allocator for what is copied from a device; always the same.
        """
        self._allocator_for = allocator_for
        self._held: dict[KeyPath, _Buffer] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.memory.numel() for buffer in self._held.values())

    def fit(self, sources: Sequence[Source]) -> dict[KeyPath, torch.Tensor]:
        """Hold a buffer for each source and no other: free first, then allocate.

        Returns:
            for the path of each source its buffer, as a contiguous tensor of its dtype and shape.
        """
        wanted = {source.path: source for source in sources if source.nbytes}
        for path in [path for path in self._held if path not in wanted or not self._fits(wanted[path])]:
            self._held.pop(path).free()
        for path, source in wanted.items():
            if path not in self._held:
                self._held[path] = _Buffer.allocated(source, self._allocator_for(source.tensor.device))
        return {source.path: self._host(source) for source in sources}

    def close(self) -> None:
        """Free all buffers. Safe to call twice."""
        self.fit(())

    def _host(self, source: Source) -> torch.Tensor:
        tensor = source.tensor
        if not source.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return self._held[source.path].values.view(tensor.shape)

    def _fits(self, source: Source) -> bool:
        return self._held[source.path].fits(source, self._allocator_for(source.tensor.device))
