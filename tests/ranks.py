"""A pool of real rank processes for tests, shared by the whole session.

Owns the processes: their start, the process group of each call, the deadline and the clean-up. A rank costs
about six seconds of imports and 750 MB, so ranks are started when first asked for and kept for later calls. Nothing
here imports torch before a rank has set its environment, and what crosses a process is plain data.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MAX_RANKS = 4
START_SECONDS = 180.0
"""How long a new rank may take to import the stack on a loaded machine."""
GRACE_SECONDS = 3.0
"""How much longer than the process group's timeout a call may last: a collective's own error should come first."""
RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """What one rank raised, as plain data: `type_name` is the qualified name of the exception's type."""

    rank: int
    type_name: str
    message: str
    traceback: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Self:
        """Describe `error`; an exception whose own `str()` fails is described as well."""
        try:
            message = str(error)
        except Exception as failure:  # an error path must not depend on foreign __str__ methods
            message = f"<str() of the exception failed: {failure!r}>"
        kind = type(error)
        return cls(
            rank=rank,
            type_name=f"{kind.__module__}.{kind.__qualname__}",
            message=message,
            traceback="".join(traceback.format_exception(error)),
        )

    @classmethod
    def lost(cls, rank: int, type_name: str, message: str, trace: str = "") -> Self:
        """Describe a rank that cannot speak for itself any more."""
        return cls(rank=rank, type_name=f"ranks.{type_name}", message=message, traceback=trace)


class RanksFailed(Exception):  # noqa: N818 - reads as what happened
    """At least one rank raised, hung or died.

    `errors` maps each such rank to its `RankError`; `outcomes` has each rank's result or `RankError`, in rank order.
    """

    def __init__(self, outcomes: Sequence[Any]) -> None:
        self.outcomes = list(outcomes)
        self.errors = {o.rank: o for o in outcomes if isinstance(o, RankError)}
        lines = [f"rank {rank}: {e.type_name}: {e.message}\n{e.traceback}" for rank, e in self.errors.items()]
        super().__init__(f"{len(self.errors)} of {len(self.outcomes)} ranks failed\n" + "\n".join(lines))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """One function call on one rank; the function travels by name and the rank imports its module itself."""

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    timeout: float
    store: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """A live rank process, the parent's end of its pipe, and the file its stack is dumped to on SIGUSR1."""

    process: BaseProcess
    pipe: Connection
    stack: Path

    def signal_group(self, number: int) -> None:
        """Signal the rank and what it started (each rank leads its own process group)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def end(self) -> None:
        """Kill the rank with the writers it started, and reap it."""
        self.signal_group(signal.SIGKILL)
        self.process.kill()  # reaches a rank too young to lead a group
        self.process.join()
        self.pipe.close()

    def dumped_stack(self, seconds: float = 2.0) -> str:
        """Ask the rank where it is. Empty when it cannot answer, for instance while it is stopped."""
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + seconds
        size = 0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            grown = self.stack.stat().st_size
            if grown and grown == size:
                break
            size = grown
        return self.stack.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """The process id, which is also that of the process group."""
        pid = self.process.pid
        if pid is None:
            raise RuntimeError("the rank process was never started")
        return pid


class RankPool:
    """Up to four gloo ranks, or `limit`, to be closed by its owner: for the tests that is the `ranks` fixture."""

    def __init__(self, limit: int = MAX_RANKS) -> None:
        self._limit = limit
        self._ranks: list[_Rank] = []
        self._context = multiprocessing.get_context("spawn")
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process id of each rank, in rank order."""
        return [rank.pid for rank in self._ranks]

    def run[T](
        self, fn: Callable[..., T], *args: Any, world_size: int = 2, timeout: float = 60.0, **kwargs: Any
    ) -> list[T]:
        """Call `fn(*args, **kwargs)` on every rank in a fresh default process group; results in rank order.

        `fn` is a module-level function of an importable module; arguments and results are picklable.
        `timeout` (seconds) is the process group's and, with a little grace, the call's.

        Raises:
            RanksFailed: a rank raised, hung or died.
        """
        outcomes = self._outcomes(fn, args, kwargs, world_size, timeout)
        if any(isinstance(outcome, RankError) for outcome in outcomes):
            raise RanksFailed(outcomes)
        return outcomes

    def run_expecting_failure[T](
        self, fn: Callable[..., T], *args: Any, world_size: int = 2, timeout: float = 60.0, **kwargs: Any
    ) -> list[T | RankError]:
        """Like `run`, but a rank that raises gives a `RankError` in place of its result.

        Raises:
            RanksFailed: a rank hung or died.
            AssertionError: no rank raised.
        """
        outcomes = self._outcomes(fn, args, kwargs, world_size, timeout)
        errors = [outcome for outcome in outcomes if isinstance(outcome, RankError)]
        if any(error.type_name.startswith("ranks.") for error in errors):
            raise RanksFailed(outcomes)
        if not errors:
            raise AssertionError(f"no rank raised; results: {outcomes!r}")
        return outcomes

    def close(self) -> None:
        """End every rank with the processes it started. Safe to call twice."""
        self._drop(self._ranks)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _outcomes(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        world_size: int,
        timeout: float,
    ) -> list[Any]:
        ranks = self._at_least(world_size)
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        for index, rank in enumerate(ranks):
            call = _Call(
                module=fn.__module__,
                name=fn.__qualname__,
                args=args,
                kwargs=kwargs,
                rank=index,
                world_size=world_size,
                timeout=timeout,
                store=str(directory / "store"),
            )
            rank.pipe.send_bytes(pickle.dumps(call))
        outcomes, lost = _collect(ranks, time.monotonic() + timeout + GRACE_SECONDS)
        if lost:
            self._drop(ranks)
        shutil.rmtree(directory, ignore_errors=True)
        return outcomes

    def _at_least(self, count: int) -> list[_Rank]:
        """Replace dead ranks and grow to `count` live ones; ranks start side by side."""
        if not 1 <= count <= self._limit:
            raise ValueError(f"world_size={count}: the pool has 1 to {self._limit} ranks")
        self._drop([rank for rank in self._ranks if not rank.process.is_alive()])
        young = [self._start() for _ in range(count - len(self._ranks))]
        self._ranks += young
        deadline = time.monotonic() + START_SECONDS
        for rank in young:
            if not rank.pipe.poll(max(0.0, deadline - time.monotonic())):
                self._drop(young)
                raise RuntimeError(f"a rank did not import its modules within {START_SECONDS:.0f} s")
            try:
                rank.pipe.recv_bytes()
            except EOFError as error:
                self._drop(young)
                raise RuntimeError("a rank died while importing its modules; see its output above") from error
        return self._ranks[:count]

    def _start(self) -> _Rank:
        ours, theirs = self._context.Pipe()
        stack = self._directory / f"stack-{self._started}"
        stack.touch()
        # Not daemonic: a daemonic process may not have children, and the NVRx writer is one.
        process = self._context.Process(target=_serve, args=(theirs, str(stack)), name=f"rank-{self._started}")
        self._started += 1
        process.start()
        theirs.close()
        return _Rank(process=process, pipe=ours, stack=stack)

    def _drop(self, ranks: Sequence[_Rank]) -> None:
        for rank in list(ranks):
            rank.end()
            self._ranks.remove(rank)


def _collect(ranks: Sequence[_Rank], deadline: float) -> tuple[list[Any], bool]:
    """Every rank's result or error until `deadline` (monotonic seconds), and whether a rank was lost."""
    outcomes: dict[int, Any] = {}
    waiting = {rank.pipe: index for index, rank in enumerate(ranks)}
    lost = False
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            if not isinstance(pipe, Connection):
                raise TypeError(f"waited for pipes, got {pipe!r}")
            index = waiting.pop(pipe)
            try:
                outcomes[index] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                lost = True
                outcomes[index] = _died(index, ranks[index])
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for index in waiting.values():
        lost = True
        stack = ranks[index].dumped_stack()
        outcomes[index] = RankError.lost(index, "RankHung", "gave no result before the deadline", stack)
    return [outcomes[index] for index in range(len(ranks))], lost


def _died(index: int, rank: _Rank) -> RankError:
    rank.process.join(GRACE_SECONDS)
    return RankError.lost(index, "RankDied", f"ended with exit code {rank.process.exitcode}")


def _serve(pipe: Connection, stack: str) -> None:
    """The main loop of a rank process: one call, one answer, until the pool's end of the pipe closes."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(RANK_ENVIRONMENT)
    with open(stack, "w") as dump:
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
        _import_stack()
        pipe.send_bytes(b"ready")
        with contextlib.suppress(EOFError):
            while True:
                call = pipe.recv_bytes()
                pipe.send_bytes(_answer(call))
    os.killpg(0, signal.SIGKILL)  # the session is gone: leave no writer behind


def _import_stack() -> None:
    """Pay for the slow imports once, outside any call's deadline."""
    import torch

    torch.set_num_threads(1)
    for module in ("megatron.core.dist_checkpointing", "nvidia_resiliency_ext.checkpointing.async_ckpt.core"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def _answer(message: bytes) -> bytes:
    rank = -1
    try:
        call: _Call = pickle.loads(message)
        rank = call.rank
        fn = getattr(importlib.import_module(call.module), call.name)
        with _process_group(call):
            result = fn(*call.args, **call.kwargs)
        return pickle.dumps(result)
    except BaseException as error:  # torch's CheckpointException derives from BaseException
        return pickle.dumps(RankError.of(rank, error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@contextlib.contextmanager
def _process_group(call: _Call) -> Iterator[None]:
    """A default gloo process group and a launcher's environment for one call; both end with it."""
    import torch.distributed as dist

    environment = dict(os.environ)
    os.environ.update(RANK=str(call.rank), LOCAL_RANK=str(call.rank), WORLD_SIZE=str(call.world_size))
    timeout = timedelta(seconds=call.timeout)
    store = dist.FileStore(call.store, call.world_size)  # type: ignore[attr-defined]  # public, not re-exported
    try:
        dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.world_size, timeout=timeout)
        # A rank that is through before its peer has connected would break the peer's connection.
        _arrive(store, "begin", call)
        store.wait(_everybody("begin", call), timeout)
        yield
        _arrive(store, "end", call)
        with contextlib.suppress(dist.DistStoreError, RuntimeError):
            store.wait(_everybody("end", call), timedelta(seconds=GRACE_SECONDS / 2))
    finally:
        _arrive(store, "end", call)
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)


def _arrive(store: "Store", place: str, call: _Call) -> None:
    store.set(f"{place}-{call.rank}", "here")


def _everybody(place: str, call: _Call) -> list[str]:
    return [f"{place}-{rank}" for rank in range(call.world_size)]
