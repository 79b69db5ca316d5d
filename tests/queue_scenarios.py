"""Scenarios for ``AsyncSaveQueue``: each runs on every rank, over a queue with a real writer process.

A writer costs some seconds of imports, so scenarios run one after the other over one queue; one that fails gives its
error.
"""

import json
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest as MegatronRequest
from workload import BESIDE, Job, StateDict, heard, state, values

from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.commit.commit import How, OnDrift
from megatron_ckpt_ext.commit.failures import SaveFailedError
from megatron_ckpt_ext.commit.queue import AsyncSaveQueue
from megatron_ckpt_ext.compat.nvrx import AsyncRequest as NvrxRequest
from megatron_ckpt_ext.metadata.container import Container, container_chunks
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.write.worker import WorkerSettings

LONG = timedelta(seconds=60)
IN_A_SESSION: dict[str, Any] = {"results_in_answer": True}
PREPARED = "prepared.metadata"
SHARED_BUFFERS: dict[str, Any] = {"cpu_shm_mode": True, "cached_metadata": True}
"""A strategy that fills the same shared memory for each save, which the writer knows from the first."""


@dataclass(kw_only=True)
class Scene:
    """One scenario on one rank."""

    queue: AsyncSaveQueue
    directory: Path
    strategy: Any
    gates: int = 0
    held: dict[str, Any] = field(default_factory=dict)
    """Directory -> what this rank saved there, for ``assert_holds``."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def request(self, name: str, state_dict: StateDict) -> Any:
        directory = self.directory / name
        directory.mkdir(exist_ok=True)
        dist.barrier()
        self.held[name] = values(state_dict)
        return dist_checkpointing.save(state_dict, str(directory), self.strategy, async_sharded_save=True)

    def schedule(self, name: str, seed: int) -> int:
        return self.queue.schedule_async_request(self.request(name, state(seed)))

    def finish(self) -> list[int]:
        return self.queue.maybe_finalize_async_calls(blocking=True)

    def ready(self) -> None:
        """Wait until all ranks have written, without a vote."""
        self.queue.maybe_finalize_async_calls(no_dist=True)
        dist.barrier()

    def failure(self, attempt: Callable[[], object]) -> str:
        try:
            attempt()
        except SaveFailedError as error:
            return f"{type(error).__name__}: {error}"
        return "no failure"

    def reuse(self, **how: Any) -> None:
        """Save with a strategy like this from now on, as a Megatron session builds it."""
        extra = {**IN_A_SESSION, **how}
        self.strategy = Job(directory="", reuse=str(self.directory.parent / PREPARED), extra=extra).strategy()

    def writer_pid(self) -> int | None:
        return None if self.queue._writer is None else self.queue._writer.pid


# Functions that run in the writer.


def gated(gate: Path, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    while not gate.exists():
        time.sleep(0.01)
    return function(*arguments, **options)


def behind(gate: Path, request: Any) -> Any:
    """The request, not written before ``gate`` exists."""
    return request._replace(async_fn=partial(gated, gate, request.async_fn))


def fail(*_arguments: Any, **_options: Any) -> None:
    raise LookupError("no such thing")


def hang(*_arguments: Any, **_options: Any) -> None:
    time.sleep(600)


def note(path: Path, text: str) -> None:
    path.write_text(text)


# Scenarios.


def blocking(scene: Scene) -> Any:
    index = scene.schedule("step_1", 1)
    return scene.finish() == [index], scene.queue.get_num_unfinalized_calls()


def polled(scene: Scene) -> Any:
    """Poll before, while and after the save gets ready; count what each poll costs."""
    gate = scene.directory / "gate"
    counted = []
    with CollectiveCounter() as counter:
        request = behind(gate, scene.request("step_1", state(1)))
        with counter.phase("schedule") as schedule:
            index = scene.queue.schedule_async_request(request)
        for moment in ("pending", "pending", "ready", "confirmed", "idle"):
            if moment == "ready":
                gate.touch()
                scene.ready()
            with counter.phase("poll") as poll:
                finalized = scene.queue.maybe_finalize_async_calls()
            dist.barrier()
            published = (scene.directory / "step_1" / ".metadata").exists()
            counted.append((moment, [each - index for each in finalized], poll.counts, published))
            dist.barrier()
    return schedule.counts, counted


def waited(scene: Scene) -> Any:
    """What a blocking wait for saves that are ready costs: each a vote and a confirmation."""
    scene.schedule("step_1", 1)
    scene.schedule("step_2", 2)
    scene.ready()
    with CollectiveCounter() as counter, counter.phase("wait") as wait:
        scene.finish()
    return wait.counts


def foreign(scene: Scene) -> Any:
    """Requests of others, with finalizers that are plain functions; on rank 1 one has nothing to write."""
    order: list[str] = []
    for name, kind in (("nvrx", NvrxRequest), ("megatron", MegatronRequest)):
        path = scene.directory / f"{name}_{scene.rank}"
        request = kind(note, (path, name), [partial(order.append, name), partial(order.append, "later")])
        scene.queue.schedule_async_request(request)
    nothing = None if scene.rank == 1 else note
    request = NvrxRequest(nothing, (scene.directory / "alone", ""), [partial(order.append, "nothing")])
    scene.queue.schedule_async_request(request)
    finished = len(scene.finish())
    return finished, order, sorted(path.name for path in scene.directory.iterdir() if path.is_file())


def foreign_failures(scene: Scene) -> Any:
    """A foreign writer, and a foreign finalizer, that fail on one rank."""
    ran: list[str] = []
    request = NvrxRequest(fail if scene.rank == 1 else note, (scene.directory / "a", ""), [lambda: ran.append("wrong")])
    scene.queue.schedule_async_request(request)
    writing = scene.failure(scene.finish)
    finalizer = fail if scene.rank == 0 else partial(ran.append, "right")
    scene.queue.schedule_async_request(NvrxRequest(note, (scene.directory / "b", ""), [finalizer]))
    return writing, scene.failure(scene.finish), ran


def logits(scene: Scene) -> Any:
    """Distillation: Megatron moves the finalizers of a save to a request behind it, whose arguments are its own."""
    request = scene.request("step_1", state(1))
    path = scene.directory / f"logits_{scene.rank}"
    behind_it = NvrxRequest(Path.write_text, (path, "shard", "utf-8", "strict"), request.finalize_fns.copy())
    request.finalize_fns.clear()
    for each in (request, behind_it):
        scene.queue.schedule_async_request(each)
    return len(scene.finish()), path.read_text()


def nothing_to_write(scene: Scene) -> Any:
    """Rank 0 holds everything."""
    scene.strategy = Job(directory="", create=str(scene.directory / "alone.metadata")).strategy()
    tensor = ShardedTensor.from_rank_offsets("w", torch.arange(4.0), (0, 0, 1))
    for step in (1, 2):
        scene.queue.schedule_async_request(scene.request(f"step_{step}", {"w": tensor} if scene.rank == 0 else {}))
        scene.finish()
    return "done"


def overlapping(scene: Scene) -> Any:
    """The second is scheduled, staged and changed while the first is not written."""
    gate = scene.directory / "gate"
    for step in (1, 2):
        state_dict = state(step)
        request = scene.request(f"step_{step}", state_dict)
        scene.queue.schedule_async_request(behind(gate, request))
        overwrite(state_dict)
    unwritten = not list((scene.directory / "step_1").glob("*.distcp"))
    in_flight = scene.queue.get_num_unfinalized_calls()
    dist.barrier()
    gate.touch()
    return unwritten, in_flight, len(scene.finish())


def overwrite(state_dict: Any) -> None:
    """What an optimizer does to the tensors after the save has returned."""
    for entry in state_dict.values():
        if isinstance(entry, dict):
            overwrite(entry)
        elif isinstance(entry, ShardedTensor):
            entry.data.fill_(-7.0)


def snapshot(scene: Scene, **how: Any) -> Any:
    """Same tensors, new values in place; the second save takes the path of what the writer has from the first."""
    scene.reuse(**how)
    state_dict = state(1)
    for step in (1, 2):
        gate = scene.directory / f"gate_{step}"
        scene.queue.schedule_async_request(behind(gate, scene.request(f"step_{step}", state_dict)))
        overwrite(state_dict)
        gate.touch()
        scene.finish()
    return "done"


def late_failure(scene: Scene) -> Any:
    """The rename fails after the vote: all ranks hear it in the next poll."""
    in_the_way = scene.directory / "bad" / ".metadata"
    request = scene.request("bad", state(1))
    dist.barrier()
    if scene.rank == 0:
        (in_the_way / "x").mkdir(parents=True)
    scene.queue.schedule_async_request(request)
    scene.ready()
    voted = scene.failure(scene.queue.maybe_finalize_async_calls)
    confirmed = scene.failure(scene.queue.maybe_finalize_async_calls)
    del scene.held["bad"]
    scene.schedule("step_2", 2)
    return voted, confirmed, len(scene.finish())


def failed_tracker(scene: Scene) -> Any:
    """A finalizer of rank 0 fails with something that is no OSError; those of rank 1 must not have run."""
    ran: list[str] = []
    request = scene.request("step_1", state(1))
    request.finalize_fns.append(fail if scene.rank == 0 else partial(ran.append, "logger"))
    scene.queue.schedule_async_request(request)
    return scene.failure(scene.finish), ran


def named(qualname: str, function: Callable[[], Any]) -> Callable[[], Any]:
    """A finalizer by the name that tells what Megatron made it for."""

    def finalizer() -> None:
        function()

    finalizer.__qualname__ = qualname
    return finalizer


def failed_logger(scene: Scene) -> Any:
    """A finalizer that only tells a logger about the save fails, on either side of the confirmation."""
    ran: list[str] = []
    request = scene.request("step_1", state(1))
    request.finalize_fns.append(named("save_checkpoint.<locals>.wandb_finalize_fn", fail))
    request.finalize_fns.append(partial(ran.append, "behind it"))
    scene.queue.schedule_async_request(request)
    return len(scene.finish()), ran


def failed_late(scene: Scene) -> Any:
    """A finalizer of rank 1 fails after all have agreed that the save is published: nobody waits for that any more."""
    request = scene.request("step_1", state(1))
    request.finalize_fns.append(fail if scene.rank == 1 else lambda: None)
    scene.queue.schedule_async_request(request)
    return len(scene.finish())


def failed_integrity(scene: Scene) -> Any:
    """The same where a finalizer needs all ranks: then all wait for it, and hear what became of it on one."""
    request = scene.request("step_1", state(1))
    request.finalize_fns.append(named("save.<locals>.integrity_finalize_fn", dist.barrier))
    request.finalize_fns.append(fail if scene.rank == 1 else lambda: None)
    scene.queue.schedule_async_request(request)
    failure = scene.failure(scene.finish)
    failed = scene.queue.consecutive_failures
    scene.schedule("step_2", 2)
    return failure, failed, len(scene.finish()), scene.queue.consecutive_failures


def failed_in_a_barrier(scene: Scene) -> Any:
    """Rank 0 fails in a finalizer in which the other ranks wait for it: with a commit of ours, and without."""

    def work_and_meet() -> None:
        if scene.rank == 0:
            fail()
        dist.barrier()

    request = scene.request("step_1", state(1))
    request.finalize_fns.append(named("save.<locals>.integrity_finalize_fn", work_and_meet))
    scene.queue.schedule_async_request(request)
    failures = [scene.failure(scene.finish)]
    meeting = [named("save.<locals>.metadata_finalize_fn", work_and_meet)]
    scene.queue.schedule_async_request(NvrxRequest(note, (scene.directory / f"{scene.rank}", ""), meeting))
    failures.append(scene.failure(scene.finish))
    total = torch.ones(1)
    dist.all_reduce(total)  # of the training
    return failures, float(total)


def same_directory(scene: Scene) -> Any:
    """Two saves into one directory overlap: neither may be taken for a checkpoint."""
    gate = scene.directory / "gate"
    scene.queue.schedule_async_request(behind(gate, scene.request("twice", state(1))))
    scene.schedule("twice", 2)
    del scene.held["twice"]
    gate.touch()
    failures = [scene.failure(scene.finish) for _ in range(2)]
    dist.barrier()
    published = (scene.directory / "twice" / ".metadata").exists()
    scene.schedule("after", 3)
    return failures, published, len(scene.finish())


def late_staging(scene: Scene) -> Any:
    """A save has failed on rank 1 when the writer of rank 0 stages what would have been published."""
    gate = scene.directory / "gate"
    request = scene.request("bad", state(1))
    del scene.held["bad"]
    scene.queue.schedule_async_request(behind(gate, request) if scene.rank == 0 else request._replace(async_fn=fail))
    failure = scene.failure(scene.finish)
    dist.barrier()
    gate.touch()
    scene.schedule("step_2", 2)
    scene.finish()
    return failure, sorted(path.name for path in (scene.directory / "bad").glob("*.tmp"))


def staged(scene: Scene) -> Any:
    """What lies there once the writers have written and nobody has voted, and what is opened to write from then on."""
    scene.schedule("step_1", 1)
    scene.ready()
    there = {path.name for path in (scene.directory / "step_1").iterdir()} - BESIDE
    before = sorted(name.split(".")[-1] for name in there)
    dist.barrier()
    opened: list[str] = []
    listening = [True]
    sys.addaudithook(lambda event, found: note_opened(opened, event, found) if listening else None)  # never goes
    scene.finish()
    listening.clear()
    return before, opened


def note_opened(opened: list[str], event: str, found: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(found[0], str) and found[2] & (os.O_WRONLY | os.O_RDWR):
        opened.append(found[0])


def follow_changed(scene: Scene, change: Callable[[Path], object], on_drift: OnDrift = OnDrift.REBUILD) -> Any:
    """Follow a prepared file that is changed by somebody else between the start of the job and its first save."""
    file = scene.directory / "own.prepared"
    if scene.rank == 0:
        shutil.copy(scene.directory.parent / PREPARED, file)
    dist.barrier()
    published: list[How] = []
    extra = {"on_commit": lambda committed: published.append(committed.how), "on_drift": on_drift}
    scene.strategy = Job(directory="", reuse=str(file), extra=extra).strategy()
    dist.barrier()
    if scene.rank == 0:
        change(file)
    dist.barrier()
    with heard() as warnings:
        failures = []
        for step in (1, 2):
            scene.schedule(f"step_{step}", step)
            failures.append(scene.failure(scene.finish))
    if on_drift is OnDrift.FAIL:
        del scene.held["step_1"]
        return published, failures
    rewritten = PreparedMetadata.load(str(file), scene.rank, dist.get_world_size())
    return published, warnings, rewritten.slice == scene.strategy.prepared.slice


def garble(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)


def make_hostile(file: Path) -> None:
    """Put a pickle in front of the trailer that would run something, with checksums that agree."""
    body = pickle.dumps(RunsCommand(f"touch {file.parent}/executed"))[:-1]
    with Container.open(str(file)) as container:
        sections = [container.section(rank) for rank in range(container.world_size)]
        header = container.header()
    encoded = [json.dumps(section).encode() for section in sections]
    file.write_bytes(b"".join(container_chunks(body=body, suffix=b".", header=header, sections=encoded)))


class RunsCommand:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (self.command,))


def follow_hostile(scene: Scene) -> Any:
    """Follow a prepared file whose layout is hostile; sections and checksums are in order, so the start succeeds."""
    file = scene.directory / "own.prepared"
    if scene.rank == 0:
        shutil.copy(scene.directory.parent / PREPARED, file)
        make_hostile(file)
    dist.barrier()
    published: list[How] = []
    extra = {"on_commit": lambda committed: published.append(committed.how)}
    scene.strategy = Job(directory="", reuse=str(file), extra=extra).strategy()
    with heard() as warnings:
        scene.schedule("step_1", 1)
        scene.finish()
    return published, warnings, (scene.directory / "executed").exists()


def unpicklable(scene: Scene) -> Any:
    request = scene.request("bad", state(1))
    del scene.held["bad"]
    if scene.rank == 1:
        request = request._replace(async_fn=lambda *_arguments: None)
    scene.queue.schedule_async_request(request)
    failure = scene.failure(scene.finish)
    scene.schedule("step_2", 2)
    return failure, len(scene.finish())


def failing_writer(scene: Scene) -> Any:
    """The save of one rank fails in its writer, which is well and goes on; the save after it was in flight already."""
    pid = scene.writer_pid()
    request = scene.request("bad", state(1))
    del scene.held["bad"]
    if scene.rank == 1:
        request = request._replace(async_fn=fail)
    scene.queue.schedule_async_request(request)
    scene.schedule("step_2", 2)
    failure = scene.failure(scene.finish)
    return failure, len(scene.finish()), scene.writer_pid() == pid


def closed(scene: Scene) -> Any:
    """Two saves in flight, the first fails: close finalizes the other and says so; twice is once; then go on."""
    request = scene.request("bad", state(1))
    del scene.held["bad"]
    scene.queue.schedule_async_request(request._replace(async_fn=fail))
    scene.schedule("step_2", 2)
    pid = scene.writer_pid()
    failure = scene.failure(scene.queue.close)
    again = scene.failure(scene.queue.close)
    gone = not Path(f"/proc/{pid}").exists()
    scene.schedule("step_3", 3)
    return failure, again, gone, scene.queue.get_num_unfinalized_calls(), len(scene.finish())


def out_of_step(scene: Scene) -> Any:
    """One rank is a save ahead of the other. Nothing can go on after that but an abort."""
    if scene.rank == 1:
        scene.queue._last_index += 1  # as if it had scheduled and finished one more
    scene.queue.schedule_async_request(NvrxRequest(note, (scene.directory / f"{scene.rank}", ""), []))
    try:
        scene.finish()
    except RuntimeError as error:
        return str(error)
    finally:
        scene.queue.close(abort=True)
    return "no error"


INTACT: dict[str, Callable[[Scene], Any]] = {
    "blocking": blocking,
    "polled": polled,
    "waited": waited,
    "foreign": foreign,
    "foreign_failures": foreign_failures,
    "logits": logits,
    "nothing_to_write": nothing_to_write,
    "overlapping": overlapping,
    "snapshot_plain": snapshot,
    "snapshot_cached": partial(snapshot, cached_metadata=True),
    "snapshot_shm": partial(snapshot, cpu_shm_mode=True),
    "snapshot_shm_cached": partial(snapshot, **SHARED_BUFFERS),
    "late_failure": late_failure,
    "failed_tracker": failed_tracker,
    "failed_logger": failed_logger,
    "failed_late": failed_late,
    "failed_integrity": failed_integrity,
    "staged": staged,
    "follow_removed": partial(follow_changed, change=Path.unlink),
    "follow_garbled": partial(follow_changed, change=garble),
    "follow_removed_strictly": partial(follow_changed, change=Path.unlink, on_drift=OnDrift.FAIL),
    "failed_in_a_barrier": failed_in_a_barrier,
    "same_directory": same_directory,
    "late_staging": late_staging,
    "follow_hostile": follow_hostile,
    "unpicklable": unpicklable,
    "failing_writer": failing_writer,
    "closed": closed,
    "out_of_step": out_of_step,
}


def hanging(scene: Scene) -> Any:
    """One writer moves no byte; it has the shared buffers of the job, which the next save must not rely on."""
    prepared = str(scene.directory.parent / "prepared.metadata")
    scene.strategy = Job(directory="", reuse=prepared, extra={"cpu_shm_mode": True, "cached_metadata": True}).strategy()
    scene.schedule("step_1", 1)
    scene.finish()
    pid = scene.writer_pid()
    request = scene.request("bad", state(2))
    del scene.held["bad"]
    if scene.rank == 1:
        request = request._replace(async_fn=hang)
    began = time.monotonic()
    scene.queue.schedule_async_request(request)
    failure = scene.failure(scene.finish)
    seconds = time.monotonic() - began
    scene.schedule("step_3", 3)
    return failure, seconds, len(scene.finish()), scene.writer_pid() != pid


def killed_while_idle(scene: Scene) -> Any:
    """A writer that dies between two saves is noticed by a poll, before the next save is planned."""
    if scene.rank == 1:
        os.kill(scene.writer_pid() or 0, signal.SIGKILL)
        os.waitid(os.P_PID, scene.writer_pid() or 0, os.WEXITED | os.WNOWAIT)
    prepared = str(scene.directory.parent / "prepared.metadata")
    scene.strategy = Job(directory="", reuse=prepared, extra={"cpu_shm_mode": True, "cached_metadata": True}).strategy()
    scene.queue.maybe_finalize_async_calls()
    scene.schedule("step_1", 1)
    return len(scene.finish())


def closed_while_stopped(scene: Scene) -> Any:
    pid = scene.writer_pid() or 0
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    scene.queue.close()
    return time.monotonic() - began, Path(f"/proc/{pid}").exists()


LOST: dict[str, Callable[[Scene], Any]] = {
    "hanging": hanging,
    "killed_while_idle": killed_while_idle,
    "closed_while_stopped": closed_while_stopped,
}


def play_on_rank(directory: str, scenarios: dict[str, Callable[[Scene], Any]], timeout: timedelta) -> Any:
    """Play the scenarios over one queue; return for each what it found, or its error, and what it saved."""
    settings = WorkerSettings(rank=dist.get_rank(), cpu_priority=0)
    queue = AsyncSaveQueue(lambda: settings, timeout=timeout)
    prepared = str(Path(directory, PREPARED))
    creating = Scene(queue=queue, directory=Path(directory), strategy=Job(directory="", create=prepared).strategy())
    creating.schedule("created", 0)
    creating.finish()
    played = {}
    for name, scenario in scenarios.items():
        scene = Scene(queue=queue, directory=Path(directory, name), strategy=None)
        scene.reuse()
        scene.directory.mkdir(exist_ok=True)
        dist.barrier()
        try:
            played[name] = (scenario(scene), scene.held)
        except Exception:
            played[name] = (traceback.format_exc(), {})
        dist.barrier()
    queue.close()
    return played
