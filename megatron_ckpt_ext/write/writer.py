"""The trainer's side of one writer process: start it, give it calls, hear what became of them, end it in time."""

import contextlib
import multiprocessing
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from megatron_ckpt_ext.write.worker import Answer, Call, Kind, WorkerSettings, serve

__all__ = ["CallState", "Writer"]

_POLL_SECONDS = 0.05


@dataclass(slots=True)
class CallState:
    """What is known about one call."""

    index: int
    """Of the call."""
    staged: bool = False
    """Whether the trainer may change its tensors again."""
    done: bool = False
    """Whether everything is written."""
    failure: str | None = None
    """Why it cannot be completed, if it cannot."""
    results: tuple[Any, ...] = ()
    """What the write function left."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.done or self.failure is not None


@dataclass(slots=True)
class _Progress:
    """Bytes that a process has moved, and when that last changed."""

    moved: int = -1
    changed: float = field(default_factory=time.monotonic)

    def seconds_without(self, pid: int | None) -> float:
        moved = _bytes_moved(pid)
        if moved != self.moved:
            self.moved, self.changed = moved, time.monotonic()
        return time.monotonic() - self.changed


class Writer:
    """One writer process and its calls. Never raises because of it: what goes wrong is the state of a call.

    No collectives. Owns the process; ``close`` ends it in bounded time.
    """

    def __init__(self, settings: WorkerSettings, timeout: timedelta) -> None:
        """Start the process.

        Args:
            settings: of the process.
            timeout: how long a call may go on without moving a byte.
        """
        context = multiprocessing.get_context("spawn")
        self._timeout = timeout
        self._calls = context.Queue()
        self._answers, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=serve, args=(self._calls, theirs, settings), name=f"writer of rank {settings.rank}", daemon=True
        )
        self._process.start()
        theirs.close()
        self._states: dict[int, CallState] = {}
        self._progress = _Progress()

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether it can take another call: alive, and no call was given up on it."""
        return self._process.is_alive() and not any(state.failure for state in self._states.values())

    def submit(self, call: Call) -> CallState:
        """Give it a call and wait until it has staged it, or failed. Bounded by the time without progress."""
        state = self._states[call.index] = CallState(index=call.index)
        self._progress = _Progress()
        try:
            # Not by the queue's own thread: what cannot be pickled would only be printed there, and never arrive.
            self._calls.put(bytes(ForkingPickler.dumps(call)))
        except Exception as error:
            state.failure = f"staging failed: the save cannot be sent to the writer: {type(error).__name__}: {error}"
        while not (state.staged or state.ended):
            self._hear(_POLL_SECONDS)
            self._judge()
        return state

    def poll(self, index: int) -> CallState:
        """Hear what has come and return the state of a call. Does not wait."""
        state = self._states[index]
        if not state.ended:
            self._hear(0.0)
            self._judge()
        return state

    def wait(self) -> None:
        """Wait until every call has ended. Bounded by the time without progress."""
        while any(not state.ended for state in self._states.values()):
            self._hear(_POLL_SECONDS)
            self._judge()

    def forget(self, index: int) -> None:
        """Drop the state of a call that has ended."""
        self._states.pop(index, None)

    def close(self, *, grace: timedelta = timedelta(seconds=10)) -> None:
        """End the process: ask, then terminate, then kill, each bounded by ``grace``. Safe to call twice."""
        if self._process.is_alive():
            with contextlib.suppress(ValueError, OSError):
                self._calls.put(None)
            if all(state.ended for state in self._states.values()):
                self._process.join(grace.total_seconds())
        for end in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                end()
                self._process.join(grace.total_seconds())
        self._calls.cancel_join_thread()
        self._calls.close()
        self._answers.close()

    def _hear(self, seconds: float) -> None:
        try:
            while self._answers.poll(seconds):
                self._take(self._answers.recv())
                seconds = 0.0
        except (EOFError, OSError):
            # The process is gone and everything that it said has been heard.
            self._give_up(f"the writer process ended with exit code {self._exit_code()}")

    def _take(self, answer: Answer) -> None:
        self._progress = _Progress()
        state = self._states.get(answer.index)
        if state is None or state.ended:
            return
        if answer.kind == Kind.STAGED:
            state.staged = True
        elif answer.kind == Kind.DONE:
            state.done, state.results = True, answer.results
        else:
            state.failure = answer.cause

    def _judge(self) -> None:
        if all(state.ended for state in self._states.values()):
            return
        if self._progress.seconds_without(self.pid) > self._timeout.total_seconds():
            self._give_up(f"the writer process moved no byte for {self._timeout.total_seconds():g} s")

    def _give_up(self, cause: str) -> None:
        for state in self._states.values():
            if not state.ended:
                phase = "writing" if state.staged else "staging"
                state.failure = f"{phase} failed: {cause}"

    def _exit_code(self) -> int | None:
        self._process.join(1.0)
        return self._process.exitcode


def _bytes_moved(pid: int | None) -> int:
    """Bytes read and written by a process so far, as Linux counts them (proc(5), ``/proc/PID/io``); else 0."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["rchar"]) + int(counts["wchar"])
