"""Where the memory of buffers comes from."""

from typing import Protocol

import torch

from megatron_ckpt_ext.staging.cuda_pages import CudaPages
from megatron_ckpt_ext.staging.page_locked import PageLockedMemory

__all__ = ["Allocator", "HostMemory", "PlainMemory"]


class Allocator(Protocol):
    """Gives out host memory. Called by the thread that stages; no collectives."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` (at least one) bytes of host memory: uint8, one dimension, aligned for any dtype."""

    def free(self, tensor: torch.Tensor) -> None:
        """Take back what ``allocate`` returned. A tensor that still refers to it keeps the memory."""


class PlainMemory:
    """Pageable memory: a copy from a GPU into it is waited for."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return new memory, also where another default device is set."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def free(self, tensor: torch.Tensor) -> None:
        """Do nothing: the memory goes with the last reference."""


class HostMemory:
    """Page-locked memory for what comes from a GPU, plain memory for the rest. Owns an allocator for each device."""

    def __init__(self) -> None:
        """Do not touch CUDA yet."""
        self._plain = PlainMemory()
        self._locked: dict[torch.device, PageLockedMemory] = {}

    def allocator_for(self, device: torch.device) -> Allocator:
        """Return the allocator for what is copied from ``device``; always the same."""
        if device.type != "cuda":
            return self._plain
        if device not in self._locked:
            self._locked[device] = PageLockedMemory(CudaPages(device))
        return self._locked[device]
