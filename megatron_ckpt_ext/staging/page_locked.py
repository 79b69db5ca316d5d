"""Page-locked host memory: a GPU copies into it while the host goes on.

``torch.empty(pin_memory=True)`` rounds each size up to a power of two, so plain pages are locked instead. A page can be
locked once only, so no two locks may share one: a large buffer has pages of its own, small ones lie together in a slab.
"""

import mmap
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["SLAB", "SMALL", "PageLockedMemory", "Pages"]

SLAB = 1 << 20
"""Bytes of a slab of small buffers; the last one may be nearly empty."""
SMALL = SLAB >> 4
"""Smaller buffers go into slabs: so neither the end of a full slab nor that of a last page wastes over a sixteenth."""
_ALIGNMENT = 64


class Pages(Protocol):
    """Who locks memory."""

    def lock(self, address: int, nbytes: int) -> None:
        """Lock whole pages that are not locked yet."""

    def unlock(self, address: int) -> None:
        """Undo ``lock``."""


@dataclass(slots=True)
class _Slab:
    """Memory that is locked and unlocked as a whole."""

    memory: mmap.mmap
    address: int
    used: int = 0
    """Bytes given out, from the beginning."""
    pieces: int = 0
    """Tensors in use."""

    def has_room(self, nbytes: int) -> bool:
        return self.used + nbytes <= len(self.memory)

    def piece(self, nbytes: int) -> torch.Tensor:
        tensor = torch.frombuffer(self.memory, dtype=torch.uint8, count=nbytes, offset=self.used)
        self.used += _rounded(nbytes, _ALIGNMENT)
        self.pieces += 1
        return tensor


class PageLockedMemory:
    """An allocator of page-locked memory. Owns the locks until all is freed. No collectives."""

    def __init__(self, pages: Pages) -> None:
        """Hold nothing."""
        self._pages = pages
        self._slabs: dict[int, _Slab] = {}
        self._open: _Slab | None = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return locked memory.

        Raises:
            StagingError: it cannot be locked.
        """
        slab = self._shared(nbytes) if nbytes < SMALL else self._locked(nbytes)
        tensor = slab.piece(nbytes)
        self._slabs[tensor.data_ptr()] = slab
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Unlock what ``allocate`` returned; a slab is unlocked with its last piece."""
        slab = self._slabs.pop(tensor.data_ptr())
        slab.pieces -= 1
        if slab.pieces:
            return
        if slab is self._open:
            self._open = None
        self._pages.unlock(slab.address)

    def _shared(self, nbytes: int) -> _Slab:
        if self._open is None or not self._open.has_room(nbytes):
            self._open = self._locked(SLAB)
        return self._open

    def _locked(self, nbytes: int) -> _Slab:
        size = _rounded(nbytes, mmap.PAGESIZE)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        slab = _Slab(memory, torch.frombuffer(memory, dtype=torch.uint8).data_ptr())
        self._pages.lock(slab.address, size)
        return slab


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
