"""The jobs of the fault matrix: what runs inside ranks and writers, and the faults themselves.

Faults come in at seams: an object that is pickled while planning or sending, the staging function, the file that the
writer opens, the end of the save on this rank, and a finalizer before the one that moves the tracker.
"""

import io
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fault_matrix import FILE_SYSTEM, SECONDS_WITHOUT_BYTES, Actor, Cell, Fault, Phase
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from ranks import RANK_ENVIRONMENT
from workload import Job, checkpoint_values, same, state, values

from megatron_ckpt_ext.commit.failures import SaveFailedError
from megatron_ckpt_ext.commit.queue import AsyncSaveQueue
from megatron_ckpt_ext.publish.atomic import write_file
from megatron_ckpt_ext.publish.latest import latest_complete_step
from megatron_ckpt_ext.write.worker import WorkerSettings

_STATE_SECONDS = 5.0
_BALLAST = "ballast"
PREPARED = "prepared.metadata"
TRACKER = "latest"
FIRED = "fired"


class InjectedError(RuntimeError):
    """The exception of the matrix."""


@dataclass(kw_only=True)
class Trap:
    """A fault that is still to come. Travels to the writer where it fires there."""

    cell: Cell
    directory: str
    writer: int | None = None
    """Process id of the writer, for signals that the trainer sends to it."""

    def fire(self, *_arguments: Any) -> None:
        """Let it happen, once in a cell, and leave a note that it did."""
        note = Path(f"{self.directory}.{FIRED}")  # beside the file system that may take nothing more
        if note.exists():
            return
        if self.cell.fault is Fault.EXCEPTION:
            note.touch()
            raise InjectedError("injected")
        if self.cell.fault is Fault.FULL:
            fill(Path(self.directory))
        elif self.cell.fault is Fault.READ_ONLY:
            remount(self.directory, "ro")
        else:
            self._send(note)
        note.touch()

    def _send(self, note: Path) -> None:
        number = signal.SIGKILL if self.cell.fault is Fault.KILL else signal.SIGSTOP
        if self.writer is None:
            note.touch()  # of the process that is about to be gone
            os.kill(os.getpid(), number)
            time.sleep(600)  # the signal may reach another thread first
        else:
            os.kill(self.writer, number)
            # Of this rank's own child, and without taking the news away from who owns it.
            os.waitid(os.P_PID, self.writer, os.WEXITED | os.WSTOPPED | os.WNOWAIT)


def process_state(pid: int) -> str:
    """Letter of proc(5); empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def fill(directory: Path) -> None:
    """Use up the file system."""
    with open(directory / _BALLAST, "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


def remount(directory: str, mode: str) -> None:
    """Make the file system read-only or writable again; the first waits until nobody writes a file there."""
    deadline = time.monotonic() + _STATE_SECONDS
    command = ["mount", "-o", f"remount,{mode}", directory]
    while subprocess.run(command, check=False, capture_output=True).returncode:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{directory} cannot be remounted {mode}")
        time.sleep(0.02)


def repair(directory: str) -> None:
    """What an operator does."""
    remount(directory, "rw")
    Path(directory, _BALLAST).unlink(missing_ok=True)


class Bait:
    """Fires when it is pickled: in the trainer, while it plans or while it sends the save to the writer."""

    def __init__(self, trap: Trap | None, content: Any) -> None:
        self._trap = trap
        self._content = content

    def __reduce__(self) -> tuple[Any, ...]:
        if self._trap is not None:
            self._trap.fire()
        return (_same, (self._content,))

    def __deepcopy__(self, _memo: Any) -> "Bait":
        return self


def _same(content: Any) -> Any:
    return content


class _Torn(io.FileIO):
    """A file in the middle of which the fault fires."""

    trap: Callable[[], None]

    def write(self, data: Any) -> int:
        done = super().write(memoryview(data)[: max(1, len(data) // 2)])
        self.trap()
        return done


def open_torn(fire: Callable[[], None], before: bool, path: str, _mode: str) -> Any:
    """Open a file for the writer: the fault fires before it is opened, or after half of what is written first."""
    if before:
        fire()
        return open(path, "wb")
    raw = _Torn(path, "wb")
    raw.trap = fire
    return io.BufferedWriter(raw)


def pause(directory: str) -> None:
    """In the writer: stand still until the trainer has had its fault."""
    Path(f"{directory}.reached").touch()
    while not Path(f"{directory}.go").exists():
        time.sleep(0.01)


def staged_after(fire: Callable[[], None], preload: Callable[[], Any]) -> Any:
    """In the writer, instead of ``preload``."""
    fire()
    return preload()


@dataclass(kw_only=True)
class Saver:
    """One job on one rank."""

    directory: str
    queue: AsyncSaveQueue
    strategy: Any
    trap: Trap | None = None
    raised: dict[int, str] = field(default_factory=dict)
    """Step -> error of its save."""

    def save(self, step: int, trap: Trap | None = None) -> bool:
        """Save a step as a training loop does; returns whether it was published."""
        try:
            self.queue.schedule_async_request(self._request(step, trap))
            if trap is not None and trap.cell.phase is Phase.WRITING and trap.cell.actor is Actor.TRAINER:
                self._fail_while_writing(trap)
            if trap is not None and trap.cell.phase is Phase.VOTE and trap.cell.actor is Actor.TRAINER:
                self.queue.maybe_finalize_async_calls(no_dist=True)
                dist.barrier()  # all have written, so the fault meets what comes then
            self.queue.maybe_finalize_async_calls(blocking=True)
        except SaveFailedError as error:
            self.raised[step] = str(error)
        return step not in self.raised

    def save_within(self, tries: int, first: int) -> int | None:
        """Save until it works; returns the step."""
        return next((step for step in range(first, first + tries) if self.save(step)), None)

    def _request(self, step: int, trap: Trap | None) -> Any:
        path = Path(self.directory, f"step_{step}")
        path.mkdir(exist_ok=True)
        dist.barrier()
        mine = trap if trap is not None and trap.cell.rank == dist.get_rank() else None
        if mine is not None and (mine.cell.actor is Actor.WRITER) and mine.cell.phase not in _IN_WRITER:
            mine.writer = self.queue._live_writer().pid
        request = dist_checkpointing.save(self._state(step, mine), str(path), self.strategy, async_sharded_save=True)
        if dist.get_rank() == 0:
            request.finalize_fns.append(partial(move_tracker, self.directory, step))
        return request if mine is None else _SET[mine.cell.phase](mine, request)

    def _state(self, step: int, trap: Trap | None) -> Any:
        rank, world = dist.get_rank(), dist.get_world_size()
        in_planning = trap if trap is not None and trap.cell.phase is Phase.PLANNING else None
        return {**state(step), "bait": ShardedObject("bait", Bait(in_planning, "bait"), (world,), (rank,))}

    def _fail_while_writing(self, trap: Trap) -> None:
        if trap.cell.rank == dist.get_rank():
            while not Path(f"{self.directory}.reached").exists():
                time.sleep(0.01)
            try:
                trap.fire()
            finally:
                Path(f"{self.directory}.go").touch()


_IN_WRITER = (Phase.STAGING, Phase.WRITING, Phase.VOTE)


def move_tracker(directory: str, step: int) -> None:
    """Megatron's finalizer that makes a checkpoint the latest, on rank 0."""
    write_file(f"{directory}/{TRACKER}", [str(step).encode()])


def _in_staging(trap: Trap, request: Any) -> Any:
    if trap.cell.actor is Actor.WRITER:
        return request._replace(preload_fn=partial(staged_after, trap.fire, request.preload_fn))
    return request._replace(async_fn=Bait(trap, request.async_fn))


def _in_writing(trap: Trap, request: Any) -> Any:
    function, before = request.async_fn, trap.cell.fault in FILE_SYSTEM
    fire = trap.fire if trap.cell.actor is Actor.WRITER else partial(pause, trap.directory)
    transforms, use_msc, _open = function.args
    return request._replace(async_fn=partial(function.func, transforms, use_msc, partial(open_torn, fire, before)))


def _before(method: str, trap: Trap, request: Any) -> Any:
    """Fire in the commit of this save, before it does what it does."""
    commit = request.finalize_fns[0]
    original = getattr(commit, method)

    def fire_first(*arguments: Any) -> Any:
        trap.fire()
        return original(*arguments)

    setattr(commit, method, fire_first)
    return request


def written_then(fire: Callable[[], None], function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """In the writer, instead of ``function``: its files are written, and nothing of what will be published."""
    function(*arguments, **options)
    fire()


def _before_vote(trap: Trap, request: Any) -> Any:
    if trap.cell.actor is Actor.TRAINER:
        return _before("outcome", trap, request)
    return request._replace(async_fn=partial(written_then, trap.fire, request.async_fn))


def _before_tracker(trap: Trap, request: Any) -> Any:
    request.finalize_fns.insert(-1, trap.fire)
    return request


_SET: dict[Phase, Callable[[Trap, Any], Any]] = {
    Phase.PLANNING: lambda _trap, request: request,
    Phase.STAGING: _in_staging,
    Phase.WRITING: _in_writing,
    Phase.VOTE: _before_vote,
    Phase.RENAME: partial(_before, "conclude"),
    Phase.TRACKER: _before_tracker,
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one rank found after a cell."""

    fired: bool
    newest: int | None
    """Step of the newest complete checkpoint, as the fault left it."""
    intact: bool
    """Whether it holds what this rank saved, bit for bit."""
    tracker: int
    """Step that the tracker names."""
    resumed: int | None
    """Step that a new job saved, from the prepared file."""
    error: str | None = None
    """Of the save with the fault."""
    went_on: int | None = None
    """Step that the same job saved afterwards."""
    seconds: float = 0.0
    """What all that took."""


def new_queue() -> AsyncSaveQueue:
    settings = WorkerSettings(rank=dist.get_rank(), cpu_priority=0)
    return AsyncSaveQueue(lambda: settings, timeout=timedelta(seconds=SECONDS_WITHOUT_BYTES))


def first_job(directory: str, queue: AsyncSaveQueue) -> Saver:
    """The job that makes the prepared file with step 1."""
    strategy = Job(directory=directory, create=f"{directory}/{PREPARED}").strategy()
    saver = Saver(directory=directory, queue=queue, strategy=strategy)
    saver.save(1)
    return saver


def resume(directory: str, queue: AsyncSaveQueue) -> int | None:
    """Save a step as a new job that follows the prepared file."""
    strategy = Job(directory=directory, reuse=f"{directory}/{PREPARED}").strategy()
    return Saver(directory=directory, queue=queue, strategy=strategy).save_within(1, 9)


def newest(directory: str) -> tuple[int | None, bool, int]:
    """Newest complete step, whether it holds what this rank saved, and the step of the tracker."""
    latest = latest_complete_step(directory)
    tracker = int(Path(directory, TRACKER).read_text())
    if latest.step is None or latest.path is None:
        return None, False, tracker
    found = checkpoint_values(latest.path)
    intact = all(same(found.get(key), value) for key, value in values(state(latest.step)).items())
    return latest.step, intact, tracker


def survive_on_rank(cells: list[tuple[Cell, str]]) -> list[Found]:
    """Cells after which the job goes on, one after the other; a new job follows on each."""
    queue, later = new_queue(), new_queue()
    found = []
    for cell, directory in cells:
        began = time.monotonic()
        saver = first_job(directory, queue)
        saver.save(2, Trap(cell=cell, directory=directory))
        dist.barrier()
        step, intact, tracker = newest(directory)
        dist.barrier()
        if dist.get_rank() == 0:
            repair(directory)
        dist.barrier()
        went_on = saver.save_within(2, 3)  # a stopped writer that had nothing to do is noticed by the next save
        found.append(
            Found(
                fired=Path(f"{directory}.{FIRED}").exists(),
                newest=step,
                intact=intact,
                tracker=tracker,
                resumed=resume(directory, later),
                error=saver.raised.get(2),
                went_on=went_on,
                seconds=time.monotonic() - began,
            )
        )
    queue.close()
    later.close()
    dist.barrier()
    return found


def resume_on_rank(cells: list[tuple[Cell, str]]) -> list[Found]:
    """Look at what jobs that ended have left, and go on from there."""
    later = new_queue()
    found = []
    for _, directory in cells:
        step, intact, tracker = newest(directory)
        fired = Path(f"{directory}.{FIRED}").exists()
        dist.barrier()
        found.append(Found(fired=fired, newest=step, intact=intact, tracker=tracker, resumed=resume(directory, later)))
    later.close()
    dist.barrier()
    return found


def die(rank: int, cell: Cell, directory: str) -> None:
    """Be a rank of a job that the fault ends."""
    os.setsid()
    os.environ.update(RANK_ENVIRONMENT, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    store = dist.FileStore(f"{directory}.store", 2)  # type: ignore[attr-defined]  # public, not re-exported
    timeout = timedelta(seconds=3 * SECONDS_WITHOUT_BYTES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    queue = new_queue()
    saver = first_job(directory, queue)
    Path(f"{directory}.writer_{rank}").write_text(str(queue._live_writer().pid))
    saver.save(2, Trap(cell=cell, directory=directory))
    raise SystemExit(f"the job goes on: {saver.raised.get(2)}")
