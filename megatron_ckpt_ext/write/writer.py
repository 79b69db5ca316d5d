"""The trainer's side of one writer process: start it, give it calls, hear what became of them, end it in time."""

import contextlib
import multiprocessing
import queue
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from megatron_ckpt_ext.write.seal import Sealed, discard
from megatron_ckpt_ext.write.snapshot import pickle_snapshot
from megatron_ckpt_ext.write.worker import Answer, Call, Kind, WorkerSettings, serve

__all__ = ["DEFAULT_TIMEOUT", "CallState", "Writer"]

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a save may go on without moving a byte."""
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
    results: bytes = b""
    """What the write function left, pickled."""
    sealed: Sealed | None = None
    """What came of the seal."""

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


class _Ear:
    """Hears a writer in a thread: one that stops in the middle of an answer must not stop the trainer with it."""

    def __init__(self, answers: Connection) -> None:
        self._answers = answers
        self._heard: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="hear the writer", daemon=True).start()

    def get(self, seconds: float) -> Answer | None:
        """Return the next answer, or ``None`` for ever once the process is gone and everything it said was heard.

        Raises:
            queue.Empty: nothing came within ``seconds``.
        """
        answer = self._heard.get(timeout=seconds)
        if answer is None:
            self._heard.put(None)
        return answer

    def _listen(self) -> None:
        try:
            with self._answers, contextlib.suppress(EOFError, OSError):
                while True:
                    self._heard.put(self._answers.recv())
        finally:
            self._heard.put(None)


class Writer:
    """One writer process and its calls. Never raises because of it: what goes wrong is the state of a call.

    No collectives. Owns the process; ``close`` ends it in bounded time.
    """

    def __init__(self, settings: WorkerSettings, timeout: timedelta) -> None:
        """Start the process.

        Args:
            settings: of the process.
            timeout: how long a call may go on without moving a byte.

        Raises:
            OSError: no process can be started.
        """
        context = multiprocessing.get_context("spawn")
        self._timeout = timeout
        self._calls = context.Queue()
        ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=serve, args=(self._calls, theirs, settings), name=f"writer of rank {settings.rank}", daemon=True
        )
        with theirs:
            self._process.start()
        self._ear = _Ear(ours)
        self._states: dict[int, CallState] = {}
        self._progress = _Progress()
        self._given_up = False

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether it can take another call: alive, and never given up on."""
        return self._process.is_alive() and not self._given_up

    def submit(self, call: Call) -> CallState:
        """Give it a call and wait until it has staged it, or failed. Bounded by the time without progress."""
        state = self._states[call.index] = CallState(index=call.index)
        self._progress = _Progress()
        try:
            # Not by the queue's own thread: what cannot be pickled would only be printed there, and never arrive.
            self._calls.put((call.index, pickle_snapshot(call)))
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
        """Drop a call, ended or not. What is staged for it from now on will be removed."""
        self._states.pop(index, None)

    def abandon(self, index: int) -> None:
        """Drop a call that nobody will publish; what was staged for it is removed. Does not wait."""
        if index in self._states and (sealed := self.poll(index).sealed) is not None:
            discard(sealed.staged)
        self.forget(index)

    def close(self, *, grace: timedelta = timedelta(seconds=10)) -> None:
        """End the process: ask one that has nothing to do, and after ``grace`` kill it. Safe to call twice.

        Calls that have not ended by then have failed.
        """
        if self.usable and all(state.ended for state in self._states.values()):
            # At interpreter exit the queue may not start its thread any more; then there is nobody to wait for.
            with contextlib.suppress(ValueError, OSError, RuntimeError):
                self._calls.put(None)
                self._process.join(grace.total_seconds())
        if self._process.is_alive():
            self._process.kill()
            self._process.join(grace.total_seconds())
        self._calls.cancel_join_thread()
        self._calls.close()
        # Hear to the end: what was done by then is done.
        deadline = time.monotonic() + grace.total_seconds()
        while not self._given_up and time.monotonic() < deadline:
            self._hear(_POLL_SECONDS)
        self._give_up("the writer process was closed")

    def _hear(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            while (answer := self._ear.get(seconds)) is not None:
                self._take(answer)
                seconds = 0.0
            self._give_up(f"the writer process ended with exit code {self._exit_code()}")

    def _take(self, answer: Answer) -> None:
        self._progress = _Progress()
        state = self._states.get(answer.index)
        if state is None or state.ended:
            if answer.sealed is not None:  # nobody will publish it
                discard(answer.sealed.staged)
            return
        if answer.kind == Kind.STAGED:
            state.staged = True
        elif answer.kind == Kind.DONE:
            state.done, state.results, state.sealed = True, answer.results, answer.sealed
        else:
            state.failure = answer.cause

    def _judge(self) -> None:
        if all(state.ended for state in self._states.values()):
            return
        if self._progress.seconds_without(self.pid) > self._timeout.total_seconds():
            seconds, moved = self._timeout.total_seconds(), self._progress.moved
            self._give_up(f"the writer process moved no byte for {seconds:g} s, {moved} bytes since its start")

    def _give_up(self, cause: str) -> None:
        self._given_up = True
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
