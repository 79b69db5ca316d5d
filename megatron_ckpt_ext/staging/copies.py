"""Copies from devices into buffers: from a GPU beside the training, from anywhere else at once."""

import time
from collections.abc import Iterable, Mapping

import torch

from megatron_ckpt_ext.staging.errors import StagingError
from megatron_ckpt_ext.staging.tensors import KeyPath, Source

__all__ = ["Copier", "Flight"]

_POLL_SECONDS = 0.001


class Flight:
    """The copies of one state dict from one GPU, under way. Keeps the sources until they have arrived."""

    def __init__(self, stream: torch.cuda.Stream, sources: list[Source]) -> None:
        """Take what was queued on ``stream`` so far, for the sources."""
        self._device = stream.device
        self._sources = sources
        self._event = stream.record_event()

    def fence(self) -> None:
        """Let the current stream of the caller wait for the copies. The host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self, deadline: float) -> None:
        """Wait for the copies until ``deadline`` (monotonic seconds), then drop the sources.

        Raises:
            StagingError: they did not arrive in time.
        """
        with torch.cuda.device(self._device):  # a thread of its own is on device 0 and must not make a context there
            while not self._event.query():
                if time.monotonic() > deadline:
                    raise StagingError(
                        f"the copies from {self._device} to host memory did not finish in time: they wait for the "
                        "training that was queued before them, so look for what blocks the GPU"
                    )
                time.sleep(_POLL_SECONDS)
        self.drop()

    def drop(self) -> None:
        """Drop the sources; the memory itself is kept by the stream until it has copied."""
        self._sources.clear()


class Copier:
    """Starts copies. Owns one stream for each GPU that there was something to copy from. No collectives."""

    def __init__(self) -> None:
        """Have no stream, and do not touch CUDA."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, sources: Iterable[Source], hosts: Mapping[KeyPath, torch.Tensor]) -> list[Flight]:
        """Copy each source into the tensor of its path; what is not on a GPU has been copied on return.

        The copies from a GPU begin when what its current stream was given so far is done. Dequantized values exist one
        at a time.
        """
        on_gpu: dict[torch.device, list[Source]] = {}
        for source in sources:
            if source.tensor.is_cuda:
                on_gpu.setdefault(source.tensor.device, []).append(source)
            else:
                hosts[source.path].copy_(source.values())
        return [self._started(device, found, hosts) for device, found in on_gpu.items()]

    def _started(self, device: torch.device, sources: list[Source], hosts: Mapping[KeyPath, torch.Tensor]) -> Flight:
        # The outer guard is left without making a context on the device that was current before, the inner is not.
        with torch.cuda.device(device):
            stream = self._stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for source in sources:
                    hosts[source.path].copy_(source.values(), non_blocking=True)
                    if source.owns_memory:
                        source.tensor.record_stream(stream)
            return Flight(stream, sources)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
        return self._streams[device]
