"""Pickling for another process that copies: what the trainer does to its tensors afterwards does not reach the copy.

torch's own pickling moves the memory of a CPU tensor to where both processes see it, so both go on to share it.
"""

import io
import os
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from megatron_ckpt_ext.compat.torch_shared import new_shared, reduce_shared

__all__ = ["SHARED_MEMORY", "check_room", "pickle_snapshot"]

SHARED_MEMORY = "/dev/shm"
"""Where Linux keeps memory that processes share."""


def pickle_snapshot(value: Any) -> bytes:
    """Pickle ``value`` for a process started by this one; CPU tensors travel as copies in shared memory.

    A tensor that is in shared memory already travels as it is: who put it there answers for it. So do subclasses of
    tensor and sparse or quantized ones, which NVRx's writer hands over as clones. No collectives.

    Raises:
        Exception: something in ``value`` cannot be pickled.
        OSError: shared memory has no room for a copy; writing there all the same would kill the process.
    """
    buffer = io.BytesIO()
    _SnapshotPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _SnapshotPickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if not _is_private_memory(value):
            return NotImplemented
        check_room(SHARED_MEMORY, value.numel() * value.element_size())
        return reduce_shared(new_shared(value.shape, value.dtype).copy_(value.detach()))


def _is_private_memory(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not value.is_quantized
        and value.numel() > 0
        and not value.is_shared()
    )


def check_room(directory: str, needed: int) -> None:
    """Refuse ``needed`` bytes that the file system of ``directory`` does not have.

    Raises:
        OSError: so it is.
    """
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    if needed > free:
        raise OSError(
            f"{directory} has {free} bytes free and {needed} bytes of tensors must be copied there: make it larger "
            "(docker: --shm-size), or let fewer ranks save at once"
        )
