"""The writer process: takes calls from one trainer rank, stages them in order, writes them in order, and answers.

Staging runs in the main thread and writing in one thread behind it, so that the staging of a save does not wait for
the write of the save before. Answers are plain data. Only ``serve`` and what it calls run in the writer; no collectives
run there.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

from megatron_ckpt_ext.metadata.body_reader import BodyReader
from megatron_ckpt_ext.write.seal import Seal, Sealed

__all__ = ["Answer", "Call", "Kind", "ReceivedResults", "ResultBox", "WorkerSettings", "serve"]


class Kind(StrEnum):
    """What an answer says."""

    STAGED = "staged"
    """The trainer may change its tensors again."""
    DONE = "done"
    """Everything is written."""
    FAILED = "failed"
    """The call cannot be completed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """How a writer process runs."""

    rank: int
    """Rank of its trainer."""
    cuda_device: int | None = None
    """Device to open; ``None``: no CUDA in this process."""
    cpu_priority: int = 10
    """Nice value, 0 to 19."""
    io_priority: int | None = None
    """ionice class; ``None`` leaves it."""
    log_level: int = logging.WARNING
    """Level of the loggers of NVRx and of this package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request, without its finalizers."""

    index: int
    """Its number in the queue."""
    function: Callable[..., Any]
    """Writes."""
    arguments: list[Any]
    """Of ``function``; the second is replaced by what ``preload`` returns."""
    options: dict[str, Any]
    """Keywords of ``function``."""
    preload: Callable[[], Any] | None
    """Stages: copies what the trainer may change."""
    seal: Seal | None = None
    """What is to be done behind ``function``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the writer says about one call: plain data."""

    index: int
    """Of the call."""
    kind: Kind
    """What it says."""
    cause: str = ""
    """For ``FAILED``: the phase that failed and why."""
    results: bytes = b""
    """For ``DONE``: what the function put into its ``ResultBox``, pickled; most trainers never look at it."""
    sealed: Sealed | None = None
    """For ``DONE``: what came of the seal."""


@dataclass(slots=True)
class ResultBox:
    """Stands in for the results queue of NVRx's write functions, for one call.

    What the function puts into the writer's copy travels in the answer, so results can never be taken for those of
    another save.
    """

    items: list[Any] = field(default_factory=list)

    def put(self, item: Any) -> None:
        """Keep a result."""
        self.items.append(item)


@dataclass(slots=True)
class ReceivedResults:
    """What the writer's box held, for who looks: NVRx takes it as it would take it from its queue."""

    pickled: bytes
    """A list; from our own process, so it can be trusted."""

    def all(self) -> list[Any]:
        """Return all of them."""
        return list(pickle.loads(self.pickled))

    def get_nowait(self) -> Any:
        """Return the first; a write function leaves one.

        Raises:
            queue.Empty: there is none.
        """
        results = self.all()
        if not results:
            raise queue.Empty
        return results[0]


def serve(calls: Any, answers: Connection, settings: WorkerSettings) -> None:
    """Be the writer process until ``None`` comes or the trainer is gone. No collectives.

    Args:
        calls: multiprocessing queue of the number of a call and the pickled ``Call``, or ``None``.
        answers: takes ``Answer``.
        settings: of this process.
    """
    # The terminal sends SIGINT to the whole job; the trainer decides whether the save in flight is completed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _watch_trainer()
    _set_up(settings)
    sender = _Sender(answers)
    writes: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
    # A daemon: if this thread fails, the process must end and not wait for a thread that waits for it.
    writing = threading.Thread(target=_write_all, args=(writes, sender), name="write", daemon=True)
    writing.start()
    while (received := calls.get()) is not None:
        _stage(received[0], received[1], sender, writes)
        del received  # it and what came of it must not occupy memory until the next save
    writes.put(None)
    writing.join()


class _Sender:
    """Sends answers from two threads over one pipe."""

    def __init__(self, answers: Connection) -> None:
        self._answers = answers
        self._lock = threading.Lock()

    def send(self, answer: Answer) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError, OSError):
            self._answers.send(answer)


def _watch_trainer() -> None:
    """End with the trainer: a writer that outlives it keeps its memory and its files for ever."""
    trainer = multiprocessing.parent_process()

    def watch() -> None:
        # Not the parent's id now: the trainer may have ended while this process was importing.
        while trainer is not None and os.getppid() == trainer.pid:
            threading.Event().wait(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="watch trainer", daemon=True).start()


def _set_up(settings: WorkerSettings) -> None:
    from megatron_ckpt_ext.compat.nvrx import open_cuda_device, set_priorities

    for name in ("nvidia_resiliency_ext", "megatron_ckpt_ext"):
        logging.getLogger(name).setLevel(settings.log_level)
    if settings.cuda_device is not None:
        open_cuda_device(settings.cuda_device)
    set_priorities(settings.cpu_priority, settings.io_priority)


def _stage(index: int, pickled: bytes, sender: _Sender, writes: "queue.SimpleQueue[Call | None]") -> None:
    try:
        call: Call = pickle.loads(pickled)
        arguments = list(call.arguments)
        if call.preload is not None:
            arguments[1] = call.preload()
    except BaseException as error:
        sender.send(_failed(index, "staging", error))
        return
    sender.send(Answer(index=index, kind=Kind.STAGED))
    writes.put(replace(call, arguments=arguments, preload=None))


def _write_all(writes: "queue.SimpleQueue[Call | None]", sender: _Sender) -> None:
    reader = BodyReader()
    while (call := writes.get()) is not None:
        try:
            sender.send(_written(call, reader))
        except BaseException as error:
            sender.send(_failed(call.index, "writing", error))
        del call


def _written(call: Call, reader: BodyReader) -> Answer:
    from megatron_ckpt_ext.compat.nvrx import results_in

    call.function(*call.arguments, **call.options)
    left = [item for box in call.arguments if isinstance(box, ResultBox) for item in box.items]
    sealed = None if call.seal is None else call.seal.apply(results_in(left), reader)
    results = pickle.dumps([_plain(item) for item in left])
    return Answer(index=call.index, kind=Kind.DONE, results=results, sealed=sealed)


def _plain(result: Any) -> Any:
    """Make an exception text: its class may not be importable, or not be picklable, on the other side."""
    return RuntimeError(f"{type(result).__name__}: {result}") if isinstance(result, BaseException) else result


def _failed(index: int, phase: str, error: BaseException) -> Answer:
    return Answer(index=index, kind=Kind.FAILED, cause=f"{phase} failed: {type(error).__name__}: {error}")
