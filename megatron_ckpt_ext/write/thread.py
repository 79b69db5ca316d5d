"""A writer in a thread of the trainer, for state that is staged in host memory."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue

__all__ = ["WriterThread"]


class WriterThread:
    """Runs jobs one after the other in one thread. Owns the thread; ``close`` ends it. No collectives of its own.

    A daemon, unlike the threads of ``concurrent.futures``: the interpreter waits for those without a deadline, and a
    write to storage that hangs would keep the process for ever.
    """

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> "Future[None]":
        """Run ``job`` behind those before it; what it raises is in the future."""
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future

    def close(self, timeout: timedelta) -> bool:
        """Let it finish what it was given; return whether it has ended. Safe to call twice."""
        self._jobs.put(None)
        self._thread.join(timeout.total_seconds())
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (given := self._jobs.get()) is not None:
            _answer(*given)
            del given  # a job holds a whole state dict


def _answer(job: Callable[[], None], future: "Future[None]") -> None:
    try:
        job()
    except BaseException as error:  # whatever it is, somebody waits for it
        future.set_exception(error)
    else:
        future.set_result(None)
