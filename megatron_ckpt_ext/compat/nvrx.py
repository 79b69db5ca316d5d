"""Names of nvidia-resiliency-ext that are version-dependent. Needs NVRx; import it where NVRx is needed only.

Read in nvidia-resiliency-ext 0.6.0 and 0.7.0. ``tests/test_compat.py`` notices when one of them moves.
"""

import inspect
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

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
    "follows_memory",
    "forget_what_the_writer_has",
    "has_shared_buffers",
    "join_instances",
    "non_tensor_items",
    "open_cuda_device",
    "results_in",
    "results_through",
    "save_function",
    "set_priorities",
    "unmatched",
]

_WRITER_OPTIONS = ("separation_hint", "use_msc", "use_cached_data_structure", "use_cpu_shm_for_gpu_tensors")
_REQUEST_FIELDS = ("async_fn", "async_fn_args", "finalize_fns", "async_fn_kwargs", "preload_fn")
_WRITER_NAMES = ("cleanup_tensor_caches", "register_shm_drain_callback", "_shm_tensor_cache")
_QUEUE_NAMES = ("get_instances", "_instances")


def unmatched() -> str | None:
    """Say what the installed NVRx does not have and is needed, or ``None``."""
    options = inspect.signature(FileSystemWriterAsync.__init__).parameters
    missing = [f"FileSystemWriterAsync({name}=)" for name in _WRITER_OPTIONS if name not in options]
    missing += [f"FileSystemWriterAsync.{name}" for name in _WRITER_NAMES if not hasattr(FileSystemWriterAsync, name)]
    missing += [f"AsyncRequest.{name}" for name in _REQUEST_FIELDS if name not in AsyncRequest._fields]
    missing += [f"AsyncCallsQueue.{name}" for name in _QUEUE_NAMES if not hasattr(AsyncCallsQueue, name)]
    missing += [] if hasattr(filesystem_async, "_results_queue") else ["_results_queue"]
    return f"nvidia-resiliency-ext has no {', no '.join(missing)}" if missing else None


def follows_memory() -> bool:
    """Whether NVRx notices that the memory of a tensor that it has sent is another one now; it does since 0.7.

    Before, a constant structure saves what is in the old memory (NeMo-RL issue 3312).
    """
    return hasattr(filesystem_async, "_compute_tensor_data_ptrs")


def save_function(writer: FileSystemWriterAsync) -> tuple[Any, Any, list[Any]]:
    """Return what writes, what prepares it, and the arguments, after ``prepare_write_data``.

    NVRx 0.6 hands CPU tensors over as they are, and what the trainer does next would be written; here they are copied,
    as 0.7 does.
    """
    if not follows_memory() and writer.uncached_tensor_data is not None:
        items, tensors = writer.uncached_tensor_data
        copies = [tensor.clone() if tensor.device.type == "cpu" else tensor for tensor in tensors]
        writer.uncached_tensor_data = items, copies
    function, preload, arguments = writer.get_save_function_and_args()
    return function, preload, arguments


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
