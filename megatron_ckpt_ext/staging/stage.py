"""``HostStager``: a copy of a state dict in host memory, so that the trainer may change its tensors again."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch

from megatron_ckpt_ext.staging.buffers import Buffers
from megatron_ckpt_ext.staging.copies import Copier, Flight
from megatron_ckpt_ext.staging.memory import Allocator, HostMemory
from megatron_ckpt_ext.staging.outline import outline_of
from megatron_ckpt_ext.staging.room import free_memory, require_room

__all__ = ["HostStager", "Staged"]

DEFAULT_TIMEOUT = timedelta(minutes=10)


class Staged:
    """A state dict in host memory, to be written and then released. No collectives.

    Attributes:
        state: the state dict: nested dicts, lists and tuples as they were, tensors in host memory (contiguous, without
            autograd), DTensors around such shards, copies of all else. To be read after ``wait``; empty once released.
        bytes: of all tensors that have a buffer; tied ones count once.
        items: tensors and objects in it.
        released: whether the buffers may be used again.
    """

    def __init__(self, *, state: dict[str, Any], nbytes: int, items: int, flights: list[Flight]) -> None:
        self.state = state
        self.bytes = nbytes
        self.items = items
        self.released = False
        self._flights = flights

    def fence(self) -> None:
        """Let the current streams wait for the copies: what is queued from now on may overwrite the sources.

        Called by the trainer. The host does not wait, and without a GPU there is nothing to do.
        """
        for flight in self._flights:
            flight.fence()

    def wait(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Wait until all values are in host memory, and drop the sources. Called by who writes, on any thread.

        Raises:
            StagingError: the copies did not finish in time.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        for flight in self._flights:
            flight.wait(deadline)

    def release(self) -> None:
        """Let the next state dict have the buffers. Called by who writes when nothing is read from them any more."""
        for flight in self._flights:
            flight.drop()
        self.state = {}
        self.released = True


class HostStager:
    """Copies one state dict after the other into host memory that it allocates once. No collectives.

    Owns the buffers and a stream on each GPU of the state dict; ``close`` frees them. CUDA is not touched unless a
    tensor of the state dict is there.
    """

    def __init__(
        self,
        *,
        limit: int | None = None,
        allocator: Allocator | None = None,
        free_memory: Callable[[], int] = free_memory,
    ) -> None:
        """Allocate nothing yet.

        Args:
            limit: how many bytes all buffers may take.
            allocator: where all buffers come from; by default page-locked memory for tensors of a GPU, plain memory for
                the others.
            free_memory: returns how many bytes of host memory are free.
        """
        self._limit = limit
        self._free_memory = free_memory
        self._buffers = Buffers(HostMemory().allocator_for if allocator is None else lambda _: allocator)
        self._copier = Copier()
        self._staged: Staged | None = None
        self._closed = False

    def stage(self, state_dict: Mapping[str, Any]) -> Staged:
        """Copy a state dict. Called by the trainer.

        On return, what is not on a GPU has been copied, and the copies of the rest are queued: its tensors may be
        overwritten behind ``fence``. They start when what the current stream was given so far is done.

        Raises:
            NoRoomError: it is larger than the budget, or than the free memory. Nothing was copied.
            StagingError: something in it cannot be copied.
            RuntimeError: the state dict before was not released, or the stager is closed.
        """
        self._require_idle()
        # Buffers made under a caller's inference mode could not be written again outside it.
        with torch.inference_mode(False), torch.no_grad():
            outline = outline_of(state_dict)
            needed = outline.nbytes
            require_room(
                needed=needed, new=needed - self._buffers.nbytes, limit=self._limit, free_memory=self._free_memory
            )
            self._arrived()
            hosts = self._buffers.fit(outline.sources)
            state = outline.filled(hosts)
            flights = self._copier.start(outline.sources, hosts)
        self._staged = Staged(state=state, nbytes=needed, items=outline.items, flights=flights)
        return self._staged

    def close(self) -> None:
        """Wait for the copies and free the buffers. Safe to call twice.

        A state dict that is not released keeps its memory.

        Raises:
            StagingError: the copies did not finish in time.
        """
        self._closed = True
        self._arrived()
        self._buffers.close()

    def _arrived(self) -> None:
        """Wait for the copies into buffers that may be freed now: who released them need not have waited."""
        if self._staged is not None:
            self._staged.wait()

    def _require_idle(self) -> None:
        if self._closed:
            raise RuntimeError("the stager is closed: make another one")
        if self._staged is not None and not self._staged.released:
            raise RuntimeError("the state dict that was staged before is not released: wait until it is written")
