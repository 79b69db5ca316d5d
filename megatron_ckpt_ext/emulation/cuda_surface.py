"""The functions and classes of ``torch.cuda`` as one CPU device offers them.

Work is done when a call returns, so streams and events order nothing. The CPU's default generator serves as
that of every device: the tensors live there, so that is the one their random operations draw from.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ckpt_ext.compat.emulated import torch_cuda_private
from megatron_ckpt_ext.replacements import Replacement

__all__ = ["cuda_surface"]

TENSOR_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
MEMORY_SIZES = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "device_memory_used",
)


def cuda_surface() -> Iterable[Replacement]:
    """Every replacement of a ``torch.cuda`` or ``torch.accelerator`` name."""
    stream = CpuStream()
    tables: list[tuple[object, dict[str, object]]] = [
        (torch.cuda, _devices()),
        (torch.cuda, _streams(stream)),
        (torch.cuda, _memory()),
        (torch.cuda, {f"{name}Tensor": getattr(torch, f"{name}Tensor") for name in TENSOR_TYPES}),
        (torch.cuda, torch_cuda_private(start=_answers(None), run_when_started=_call_now)),
        (torch.cuda, {"default_generators": DefaultGenerators()}),
        (torch.cuda, _random()),
        (torch.cuda.random, _random()),
        (torch.accelerator, {"is_available": _answers(True), "current_device_index": _answers(0)}),
    ]
    for owner, table in tables:
        for name, value in table.items():
            yield owner, name, value


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuProperties:
    """What ``get_device_properties`` answers: a device of compute capability 8.0 with the host's memory."""

    total_memory: int
    name: str = "CPU emulation"
    major: int = 8
    minor: int = 0
    multi_processor_count: int = 1


class CpuDevice(nullcontext[None]):
    """``torch.cuda.device``: a context that makes a device current, of which there is one."""


class CpuStream:
    """A stream whose work is always done."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # device and priority

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def wait_stream(self, stream: object) -> None:
        """Return at once."""

    def wait_event(self, event: object) -> None:
        """Return at once."""

    def record_event(self, event: "CpuEvent | None" = None) -> "CpuEvent":
        """Record ``event``, or a new one, now."""
        recorded = event or CpuEvent()
        recorded.record()
        return recorded


class CpuEvent:
    """An event that has happened as soon as it is recorded; times come from the host's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.recorded_at = 0.0

    def record(self, stream: object = None) -> None:
        """Remember the time."""
        self.recorded_at = time.perf_counter()

    def elapsed_time(self, end: "CpuEvent") -> float:
        """Milliseconds from this event to ``end``."""
        return (end.recorded_at - self.recorded_at) * 1e3

    def wait(self, stream: object = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whether it has happened: always."""
        return True


class DefaultGenerators:
    """``torch.cuda.default_generators``: the CPU's generator, whichever device is asked for."""

    def __getitem__(self, device: object) -> torch.Generator:
        """The default generator."""
        return torch.default_generator


def _answers(value: Any) -> Callable[..., Any]:
    """A function that takes anything and answers ``value``.

    A new one for each name: torch refuses to import its compiler when two of these names are one object.
    """

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _passes_to(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own that does what ``function`` does; see ``_answers`` for why."""

    def call(*args: Any) -> Any:
        return function(*args)

    return call


def _enters(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """A context that changes nothing: there is one device and one stream."""
    return nullcontext()


def _call_now(callback: Callable[[], Any], **kwargs: Any) -> None:
    """CUDA counts as started, so what waits for it runs."""
    callback()


def _host_memory() -> int:
    """Bytes of memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_count() -> int:
    """One device for each rank of this node."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _devices() -> dict[str, object]:
    """Which devices there are, and what they can do."""
    properties = CpuProperties(total_memory=_host_memory())
    return {
        "is_available": _answers(True),
        "is_initialized": _answers(True),
        "init": _answers(None),
        "device_count": _device_count,
        "current_device": _answers(0),
        "set_device": _answers(None),
        "device": CpuDevice,
        "synchronize": _answers(None),
        "get_device_properties": _answers(properties),
        "get_device_capability": _answers((properties.major, properties.minor)),
        "get_device_name": _answers(properties.name),
    }


def _streams(stream: CpuStream) -> dict[str, object]:
    """Streams and events; there is one current stream."""
    return {
        "Stream": CpuStream,
        "Event": CpuEvent,
        "current_stream": _answers(stream),
        "default_stream": _answers(stream),
        "stream": _enters,
        "set_stream": _answers(None),
        "is_current_stream_capturing": _answers(False),
    }


def _memory() -> dict[str, object]:
    """Memory statistics: nothing is allocated on a device that does not exist."""
    return {
        **{name: _answers(0) for name in MEMORY_SIZES},
        "memory_stats": _answers(Counter[str]()),
        "mem_get_info": _answers((_host_memory(), _host_memory())),
        "reset_peak_memory_stats": _answers(None),
        "empty_cache": _answers(None),
        "ipc_collect": _answers(None),
    }


def _random() -> dict[str, object]:
    """Random state, kept in the CPU's default generator (``torch.manual_seed`` would come back here)."""
    generator = torch.default_generator
    return {
        "manual_seed": _passes_to(generator.manual_seed),
        "manual_seed_all": _passes_to(generator.manual_seed),
        "initial_seed": _passes_to(generator.initial_seed),
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda new_state, device=None: generator.set_state(new_state),
    }
