"""Copies of what is not a tensor, with the tensors in it."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_ckpt_ext.staging.errors import StagingError
from megatron_ckpt_ext.staging.tensors import KeyPath, is_dense, named

__all__ = ["deep_copy"]

_MAKE_A_COPY = (torch.Tensor.__deepcopy__, torch.Tensor.clone)
"""What ``copy.deepcopy`` calls for a tensor and for a parameter."""


def deep_copy(path: KeyPath, value: object) -> Any:
    """Return a deep copy in host memory. No collectives; waits for tensors that are on a device.

    Raises:
        StagingError: ``value`` cannot be copied.
    """
    try:
        with _OntoTheHost():
            return copy.deepcopy(value)
    except Exception as error:
        raise StagingError(
            f"{named(path)}, a {type(value).__name__}, cannot be copied: {error}. Take it out of the state dict"
        ) from error


class _OntoTheHost(TorchFunctionMode):
    """Has tensors copied into host memory: nobody would know when a copy on their device is finished.

    Sparse and nested ones go the same way: ``copy.deepcopy`` fails for some.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _MAKE_A_COPY and not (args[0].device.type == "cpu" and is_dense(args[0])):
            return args[0].detach().to("cpu", copy=True)
        return func(*args, **(kwargs or {}))
