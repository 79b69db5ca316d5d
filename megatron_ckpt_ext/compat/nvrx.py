"""Names of nvidia-resiliency-ext that are version-dependent. Needs NVRx; import it where NVRx is needed only.

Read in nvidia-resiliency-ext 0.7.0. ``tests/test_compat.py`` notices when one of them moves.
"""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest, _set_process_qos
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

__all__ = [
    "AsyncRequest",
    "FileSystemWriterAsync",
    "drain_before_reuse",
    "forget_what_the_writer_has",
    "has_shared_buffers",
    "join_instances",
    "non_tensor_items",
    "open_cuda_device",
    "results_in",
    "results_through",
    "set_priorities",
]


def non_tensor_items(writer: FileSystemWriterAsync) -> tuple[list[WriteItem], list[io.BytesIO]]:
    """Return the non-tensor items of a writer after ``prepare_write_data``, and their data, to change in place."""
    return writer.byte_io_data or ([], [])


def results_in(left: Iterable[object]) -> list[WriteResult] | None:
    """Return the write results in what a write function put into its queue; ``None`` if it put an exception there."""
    results: list[WriteResult] = []
    for item in left:
        if not isinstance(item, dict):
            return None
        results.extend(chain.from_iterable(item.values()))
    return results


def set_priorities(cpu_priority: int, io_priority: int | None) -> None:
    """Make this process give way to training; a failure is logged and costs nothing."""
    _set_process_qos(cpu_priority=cpu_priority, io_priority=io_priority)


def open_cuda_device(device: int) -> None:
    """Open a device before the first handle comes: else every writer of a node opens device 0 as well."""
    torch.cuda.set_device(device)
    torch.empty(1, device=f"cuda:{device}")


def drain_before_reuse() -> None:
    """Let every queue of ours wait for its writer before shared buffers are filled again.

    NVRx has room for one callback in a process and clears it with the queue that ends first, so this one asks all
    queues that joined, and stays.
    """
    FileSystemWriterAsync.register_shm_drain_callback(_drain_queues)


def _drain_queues() -> None:
    for queue in AsyncCallsQueue.get_instances():
        if not isinstance(queue, AsyncCallsQueue):
            queue.maybe_finalize_async_calls(no_dist=True)


@contextmanager
def results_through(queue: object) -> Iterator[None]:
    """Let writers that are prepared inside leave their results in ``queue``; NVRx starts a process for its own."""
    before, filesystem_async._results_queue = filesystem_async._results_queue, queue
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def forget_what_the_writer_has() -> None:
    """Forget which tensors were sent: a new writer process has none of them."""
    FileSystemWriterAsync.cleanup_tensor_caches()


def join_instances(queue: object) -> None:
    """Let ``abort_nvrx_checkpoint`` (in-process restart) find a queue that is not NVRx's own class."""
    AsyncCallsQueue._instances.add(queue)


def has_shared_buffers() -> bool:
    """Whether an earlier save left buffers in shared memory that the next one fills again."""
    return bool(FileSystemWriterAsync._shm_tensor_cache)
