"""Queues that are closed, aborted, followed by others, or side by side, in one process. Each function runs on ranks."""

import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from guarantee_scenarios import NO_ERROR, end_with, error_of, large, pid_of_writer, published
from megatron.core import dist_checkpointing
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import abort_nvrx_checkpoint
from queue_scenarios import LONG, SHARED_BUFFERS, behind
from watching import Groups, children, fill, shared_bytes
from workload import Job, state, values

from megatron_ckpt_ext.commit.queue import AsyncSaveQueue
from megatron_ckpt_ext.compat.mcore import TorchDistSaveShardedStrategy
from megatron_ckpt_ext.compat.nvrx import AsyncRequest, forget_what_the_writer_has
from megatron_ckpt_ext.emulation import CpuEmulation
from megatron_ckpt_ext.write.worker import WorkerSettings

SHORT = timedelta(seconds=5)
"""How long a writer may move no byte where a test waits for that."""
type Kept = dict[str, dict[str, Any]]
"""Directory -> what this rank saved there."""


def new_queue(timeout: timedelta = LONG) -> AsyncSaveQueue:
    settings = WorkerSettings(rank=dist.get_rank(), cpu_priority=0)
    return AsyncSaveQueue(lambda: settings, timeout=timeout)


class Life:
    """A job in this process: one queue, and a strategy that fills the same shared memory for each save."""

    def __init__(self, directory: str, name: str, timeout: timedelta = LONG, **how: Any) -> None:
        self.directory = Path(directory)
        self.queue = new_queue(timeout)
        self.strategy = Job(
            directory="", create=str(self.directory / f"{name}.metadata"), extra={**SHARED_BUFFERS, **how}
        ).strategy()
        self.kept: Kept = {}

    def schedule(self, name: str, state_dict: Any, gate: Path | None = None) -> int:
        path = self.directory / name
        path.mkdir(exist_ok=True)
        dist.barrier()
        self.kept[name] = values(state_dict)
        request = dist_checkpointing.save(state_dict, str(path), self.strategy, async_sharded_save=True)
        return self.queue.schedule_async_request(request if gate is None else behind(gate, request))

    def finish(self) -> str:
        return error_of(partial(self.queue.maybe_finalize_async_calls, blocking=True))


def lives_on_rank(directory: str) -> dict[str, Any]:
    """One queue that is closed and used again, a second one beside it, and the end of a writer that was killed."""
    forget_what_the_writer_has()  # an earlier test's, in this rank
    found: dict[str, Any] = {}
    found["processes before the first save"] = before_the_first_save(Path(directory))
    life = Life(directory, "first")
    shared = shared_bytes()
    life.schedule("step_1", state(1))
    errors = [life.finish()]
    writer = pid_of_writer(life.queue, life.directory)
    in_use = shared_bytes() - shared
    last_words = life.directory / "last_words"
    life.queue.schedule_async_request(AsyncRequest(end_with, (last_words,), []))
    life.finish()
    for _ in range(2):
        life.queue.close()
    found["closed"] = {
        "in use": in_use,
        "left": shared_bytes() - shared,
        "writer left": writer in children(),
        "killed": not last_words.exists(),
    }

    life.schedule("step_2", state(2))
    errors.append(life.finish())
    found["saved again"] = (errors, dict(life.kept))

    life = Life(directory, "second") if errors[-1] != NO_ERROR else life
    found["overlapping alone"] = overlapping(life, "alone")
    second = Life(directory, "beside", SHORT, cached_metadata=False, cpu_shm_mode=False, process_group=dist.new_group())
    used = []
    for number, each in enumerate((life, second)):
        dist.barrier()
        watched = Groups()
        each.schedule(f"two_queues_{number}", state(number))
        each.finish()
        used.append(set(watched.used()) - {Groups.default()})
    found["groups"] = used
    found["closed while writing"] = closed_while_writing(second)
    found["overlapping beside"] = overlapping(life, "beside")
    found["left after a kill"] = killed(life)
    life.queue.close()
    return found


def before_the_first_save(directory: Path) -> list[int]:
    """Processes that a queue without saves, its poll, and a save that is not asynchronous leave behind."""
    with CpuEmulation(megatron=False):
        save_synchronously(TorchDistSaveShardedStrategy(), directory / "stock")  # Megatron's own helper processes
        others = children()
        queue = new_queue()
        queue.maybe_finalize_async_calls(blocking=True)
        strategy = Job(directory="", create=str(directory / "never.metadata")).strategy()
        save_synchronously(strategy, directory / "synchronous")
        queue.close()
    return sorted(children() - others)


def save_synchronously(strategy: Any, directory: Path) -> None:
    directory.mkdir()
    dist_checkpointing.save(state(1), str(directory), strategy)


def closed_while_writing(life: Life) -> tuple[str, float, bool, int]:
    """Close a queue whose writer has a save and moves no byte: the error, how long, what is published, what is left."""
    life.schedule("hung", state(1), life.directory / "never")
    began = time.monotonic()
    error = error_of(life.queue.close)
    seconds = time.monotonic() - began
    return error, seconds, published(life.directory / "hung"), life.queue.get_num_unfinalized_calls()


def overlapping(life: Life, name: str) -> tuple[str, Kept]:
    """Fill the shared buffers anew while a slow writer has not read them yet."""
    state_dict = state(1)
    for step in (1, 2, 3):
        fill(state_dict, float(step))
        gate = life.directory / f"gate_{name}_{step}"
        threading.Timer(0.3, gate.touch).start()
        life.schedule(f"{name}_{step}", state_dict, gate)
    return life.finish(), {each: kept for each, kept in life.kept.items() if each.startswith(f"{name}_")}


def killed(life: Life) -> tuple[str, int, int]:
    """Kill the writer while it has a large save; bytes of that in shared memory before and after."""
    life.strategy = Job(directory="", create=str(life.directory / "large.metadata")).strategy()
    before = shared_bytes()
    writer = pid_of_writer(life.queue, life.directory)
    life.schedule("large", large(1), life.directory / "never")
    held = shared_bytes(writer)
    os.kill(writer, signal.SIGKILL)
    error = life.finish()
    return error, held, shared_bytes() - before


def restart_on_rank(directory: str) -> dict[str, Any]:
    """NVRx's in-process restart, with one save written but not finalized, and one that is being written.

    Then a new group, a new queue and a new strategy, as the function that is run again makes them.
    """
    forget_what_the_writer_has()
    rank, world = dist.get_rank(), dist.get_world_size()
    old = Life(directory, "prepared")
    old.schedule("step_1", state(1))
    old.finish()
    gates = [Path(directory, name) for name in ("gate", "new_gate")]
    old.schedule("written", state(2))
    old.queue.maybe_finalize_async_calls(no_dist=True)
    old.schedule("cut_off", state(3), gates[0])
    dist.barrier()

    abort_nvrx_checkpoint()
    dist.destroy_process_group()
    store = dist.FileStore(f"{directory}/store", world)  # type: ignore[attr-defined]  # public, not re-exported
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))

    new = Life(directory, "unused")
    new.strategy = Job(directory="", reuse=f"{directory}/prepared.metadata", extra=SHARED_BUFFERS).strategy()
    index = new.schedule("retry", state(4), gates[1])
    polls: list[int] = []
    errors = [error_of(lambda: polls.extend(new.queue.maybe_finalize_async_calls())) for _ in range(3)]
    too_early = (list(polls), published(new.directory / "retry"))
    dist.barrier()
    for gate in gates:
        gate.touch()
    error = error_of(lambda: polls.extend(new.queue.maybe_finalize_async_calls(blocking=True)))
    found = {
        "errors": [*errors, error],
        "too early": too_early,
        "finalized": polls == [index],
        "of the old": [published(old.directory / name) for name in ("written", "cut_off")],
        "the old queue": (old.queue.maybe_finalize_async_calls(blocking=True), old.queue.get_num_unfinalized_calls()),
        "kept": {"retry": new.kept["retry"]},
    }
    new.queue.close()
    return found
