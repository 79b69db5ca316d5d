"""Names of torch about shared memory that are private. Needs torch.

Read in torch 2.14.1. ``tests/test_writer.py`` notices when one of them moves.
"""

from typing import Any

import torch
from torch.multiprocessing import reductions

__all__ = ["new_shared", "reduce_shared"]


def new_shared(size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor in shared memory without filling it first, as ``share_memory_`` would."""
    storage = torch.UntypedStorage._new_shared(size.numel() * dtype.itemsize, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(storage).view(size)


def reduce_shared(tensor: torch.Tensor) -> Any:
    """Return what pickle needs to send a tensor to another process."""
    return reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
