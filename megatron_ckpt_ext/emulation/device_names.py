"""What device arguments and tensor type names mean under the emulation: every ``cuda`` device is the CPU.

The mapping is a torch function mode, so it covers every torch call of the thread that entered it, also those
inside libraries. Other threads and data loader workers see torch as it is: use ``--num-workers 0``.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["CudaDevicesAreCpu"]

CPU = torch.device("cpu")
CUDA_NAME = re.compile(r"cuda(:\d+)?")
TORCH_TYPE_NAME = re.compile(r"^torch\.(?:cuda\.)?")


class CudaDevicesAreCpu(TorchFunctionMode):
    """Maps CUDA devices to the CPU, leaves memory unpinned, and names CPU tensor types as CUDA ones."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` with its device arguments mapped; called by torch for each of its functions."""
        named = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.device:
            return _cpu_for_cuda(func(*args, **named))
        if func is torch.Tensor.type:
            return _tensor_type(*args, **named)
        if func is torch.Tensor.to:
            args = (args[0], *map(_cpu_for_index, args[1:]))
        named.pop("pin_memory", None)
        if "device" in named:
            named["device"] = _cpu_for_index(named["device"])
        return func(*map(_cpu_for_cuda, args), **{key: _cpu_for_cuda(value) for key, value in named.items()})


def _cpu_for_cuda(value: Any) -> Any:
    """The CPU device for a CUDA device or its name; anything else as it is."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str) and CUDA_NAME.fullmatch(value):
        return CPU
    return value


def _cpu_for_index(value: Any) -> Any:
    """The CPU device for a device index (a bare integer means a CUDA device to torch)."""
    return CPU if type(value) is int else value


def _tensor_type(tensor: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    """``Tensor.type``: Megatron's distributed optimizer compares the answer with ``torch.cuda.*`` names."""
    if dtype is None:
        return TORCH_TYPE_NAME.sub("torch.cuda.", tensor.type())
    if isinstance(dtype, str):
        dtype = TORCH_TYPE_NAME.sub("torch.", dtype)
    return tensor.type(dtype, **kwargs)
