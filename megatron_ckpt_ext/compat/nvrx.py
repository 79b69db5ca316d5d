"""Names of nvidia-resiliency-ext that are version-dependent. Needs NVRx; import it where NVRx is needed only.

Read in nvidia-resiliency-ext 0.7.0. ``tests/test_compat.py`` notices when one of them moves.
"""

import io

from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize as stock_finalize,
)
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_plan as stock_plan,
)
from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["AsyncRequest", "FileSystemWriterAsync", "non_tensor_items", "stock_finalize", "stock_plan"]


def non_tensor_items(writer: FileSystemWriterAsync) -> tuple[list[WriteItem], list[io.BytesIO]]:
    """Return the non-tensor items of a writer after ``prepare_write_data``, and their data, to change in place."""
    return writer.byte_io_data or ([], [])
