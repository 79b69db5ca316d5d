"""Names of torch.distributed.checkpoint that are private or moved between releases.

Read in torch 2.14.1. ``tests/test_compat.py`` notices when one of them moves.
"""

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException, _is_wrapped_exception
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.futures import Future
from torch.serialization import _get_layout

__all__ = [
    "ERRORS",
    "METADATA_FILE",
    "METADATA_GLOBALS",
    "PLAN_GLOBALS",
    "DistWrapper",
    "FileWriter",
    "StorageInfo",
    "is_wrapped_exception",
]

DistWrapper = _DistWrapper
StorageInfo = _StorageInfo
is_wrapped_exception = _is_wrapped_exception

ERRORS = (Exception, CheckpointException)
"""Whatever can go wrong on one rank and must become a vote: torch's own class is no ``Exception``."""

METADATA_FILE = ".metadata"
"""File name of a checkpoint's metadata, its completeness marker (``torch...filesystem._metadata_fn``)."""

METADATA_GLOBALS: frozenset[tuple[str, str]] = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", _get_layout.__name__),
        ("torch.distributed.checkpoint.filesystem", _StorageInfo.__name__),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", _MEM_FORMAT_ENCODING.__name__),
        ("collections", "OrderedDict"),
    }
)
"""What a pickled ``Metadata`` refers to, dtypes apart."""

PLAN_GLOBALS: frozenset[tuple[str, str]] = frozenset(
    {
        ("torch.distributed.checkpoint.filesystem", _StoragePrefix.__name__),
        ("torch.distributed.checkpoint.planner", "BytesIOWriteData"),
        ("torch.distributed.checkpoint.planner", "SavePlan"),
        ("torch.distributed.checkpoint.planner", "TensorWriteData"),
        ("torch.distributed.checkpoint.planner", "WriteItem"),
        ("torch.distributed.checkpoint.planner", "WriteItemType"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }
)
"""What NVRx (``all_local_plans``) and torch's own writer (a path as checkpoint id) add to it."""


class FileWriter(FileSystemWriter):
    """torch's writer, with helper threads whose errors are heard, and without any while the interpreter ends.

    torch only prints what goes wrong in its helpers, does not join them if its own part fails, and cannot start them at
    the interpreter's end, where ``tests/test_manager.py`` saves.
    """

    def _write_data(self, planner: Any, file_queue: Any) -> Any:
        helpers, self.thread_count = self.thread_count - 1, 1  # each call below takes files until there are none
        write = functools.partial(super()._write_data, planner, file_queue)
        with ThreadPoolExecutor(max(1, helpers), thread_name_prefix="checkpoint file") as pool:
            started = []
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                started += [pool.submit(write) for _ in range(helpers)]
            parts = [write(), *(each.result() for each in started)]
        written: Future[list[WriteResult]] = Future()
        written.set_result([result for part in parts for result in part.value()])
        return written
