"""The switch: puts the CPU emulation in place and removes it again."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch

from megatron_ckpt_ext.compat.emulated import megatron_optimizer
from megatron_ckpt_ext.emulation.cuda_surface import cuda_surface
from megatron_ckpt_ext.emulation.device_names import CudaDevicesAreCpu
from megatron_ckpt_ext.emulation.fused_adam import FusedAdam
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.replacements import Replacements

__all__ = ["CpuEmulation", "CudaWorksError", "refuse_where_cuda_works"]


class CudaWorksError(ConfigurationError):
    """The CPU emulation was asked for in a process that has a CUDA device (or already emulates one)."""


def refuse_where_cuda_works() -> None:
    """Raise ``CudaWorksError`` if torch finds a CUDA device; the emulation itself counts as one."""
    if torch.cuda.is_available():
        raise CudaWorksError(
            "CPU emulation was asked for, but torch finds a CUDA device here: run without it, or hide the devices "
            "with CUDA_VISIBLE_DEVICES= if a CPU run is meant."
        )


class CpuEmulation:
    """A context in which ``cuda`` names act on CPU tensors; enter it before Megatron is imported.

    With ``megatron=False`` only torch is emulated, which is all that a checkpoint worker process needs.
    Devices are mapped in the thread that enters. No collectives.
    """

    def __init__(self, *, megatron: bool = True) -> None:
        self._megatron = megatron
        self._active = ExitStack()

    def __enter__(self) -> Self:
        """Switch the emulation on, or raise ``CudaWorksError``; an error leaves everything as it was."""
        refuse_where_cuda_works()
        with ExitStack() as stack:
            replacements = stack.enter_context(Replacements())
            replacements.apply(cuda_surface())
            stack.enter_context(CudaDevicesAreCpu())
            if self._megatron:
                replacements.apply(megatron_optimizer(FusedAdam))
            self._active = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Switch it off and put every name back."""
        self._active.close()
