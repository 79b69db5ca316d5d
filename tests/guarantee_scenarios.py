"""Scenarios behind the guarantees in ``docs/guarantees.md``; as in ``queue_scenarios``, each runs on every rank."""

import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from queue_scenarios import SHARED_BUFFERS, Scene, behind, fail, note
from torch.distributed.checkpoint.api import CheckpointException
from watching import Groups, resident_bytes, shared_bytes, still_in_use, watched
from workload import Job, state

from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.commit.queue import AsyncSaveQueue
from megatron_ckpt_ext.compat.nvrx import AsyncRequest
from megatron_ckpt_ext.publish.atomic import write_file

TRACKER = "latest"
LARGE = 4 << 20
"""Elements of a large tensor: 16 MiB."""


def move_tracker(directory: Path, step: int) -> None:
    """Megatron's finalizer that makes a checkpoint the latest, on rank 0."""
    write_file(str(directory / TRACKER), [str(step).encode()])


def tracker(directory: Path) -> str:
    """What the tracker says; empty if there is none."""
    path = directory / TRACKER
    return path.read_text() if path.exists() else ""


def published(directory: Path) -> bool:
    return (directory / ".metadata").exists()


def with_tracker(scene: Scene, name: str, step: int) -> Any:
    request = scene.request(name, state(step))
    if scene.rank == 0:
        request.finalize_fns.append(partial(move_tracker, scene.directory, step))
    return request


NO_ERROR = "no error"


def error_of(attempt: Callable[[], object]) -> str:
    """What an attempt raises, whatever it is: where ranks differ, the test is to say so and not to hang."""
    try:
        attempt()
    except (Exception, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    return NO_ERROR


def poll_until_raised(scene: Scene) -> tuple[str, bool]:
    """Poll as a training loop does each step; the error, and whether a poll that does not block raised it."""
    scene.ready()
    errors = [error_of(scene.queue.maybe_finalize_async_calls) for _ in range(3)]
    return next((error for error in errors if error != NO_ERROR), NO_ERROR), errors != [NO_ERROR] * 3


def pid_of_writer(queue: AsyncSaveQueue, directory: Path) -> int:
    """As the writer itself says. Called on all ranks."""
    path = directory / f"pid_{dist.get_rank()}"
    queue.schedule_async_request(AsyncRequest(write_pid, (path,), []))
    queue.maybe_finalize_async_calls(blocking=True)
    return int(path.read_text())


# Functions that run in the writer.


def write_pid(path: Path) -> None:
    path.write_text(str(os.getpid()))


def write_cuda(path: Path) -> None:
    path.write_text(str(torch.cuda.is_initialized()))  # type: ignore[no-untyped-call]  # torch


def end_with(path: Path) -> None:
    """Leave a note when this process ends by itself, and not when it is killed."""
    Finalize(None, path.touch, exitpriority=1)


def truncated(keep: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Write everything and tell about ``keep`` items only; -1 keeps all but the last."""
    function(*arguments, **options)
    box = arguments[2]
    box.items[:] = [{worker: items[:keep] for worker, items in results.items()} for results in box.items]


def silent(function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Write everything and tell nothing."""
    function(*arguments, **options)
    arguments[2].items.clear()


# Scenarios: the ranks agree.


def unequal_delays(scene: Scene) -> Any:
    """In each save another rank is done first; what each poll of each rank did."""
    polls = []
    for step, first in ((1, 0), (2, 1)):
        gates = [scene.directory / f"gate_{step}_{rank}" for rank in (0, 1)]
        scene.queue.schedule_async_request(behind(gates[scene.rank], scene.request(f"step_{step}", state(step))))
        for opened in (None, first, 1 - first):
            if opened is not None and scene.rank == opened:
                gates[opened].touch()
                scene.queue.maybe_finalize_async_calls(no_dist=True)
            dist.barrier()
            for _ in range(2):
                with CollectiveCounter() as counter, counter.phase("poll") as poll:
                    finalized = len(scene.queue.maybe_finalize_async_calls())
                polls.append((opened == 1 - first, finalized, poll.counts, scene.queue.get_num_unfinalized_calls()))
    return polls


def hooks(scene: Scene) -> Any:
    """When the hooks of a save run on this rank, and whether it was published then."""
    ran: list[tuple[int, bool]] = []
    poll = 0
    request = scene.request("step_1", state(1))
    request.finalize_fns.append(lambda: ran.append((poll, published(scene.directory / "step_1"))))
    scene.queue.schedule_async_request(request)
    scene.ready()
    for poll in (1, 2, 3):  # noqa: B007 - the hook reads it
        scene.queue.maybe_finalize_async_calls()
    return ran


def failing_hook(scene: Scene, where: int) -> Any:
    """A hook around the save fails on one rank, behind what makes the checkpoint the latest."""
    request = with_tracker(scene, "step_1", 1)
    request.finalize_fns.append(fail if scene.rank == where else partial(int, "0"))
    scene.queue.schedule_async_request(request)
    failure = poll_until_raised(scene)
    dist.barrier()
    found = tracker(scene.directory)
    scene.schedule("step_2", 2)
    return failure, found, len(scene.finish())


def failing_callback(scene: Scene, where: int) -> Any:
    """What was registered with ``on_commit`` fails on one rank."""
    scene.reuse(on_commit=fail if scene.rank == where else None)
    scene.schedule("step_1", 1)
    failure = poll_until_raised(scene)
    dist.barrier()
    found = published(scene.directory / "step_1")
    scene.reuse()
    scene.schedule("step_2", 2)
    return failure, found, len(scene.finish())


def failures_in_a_row(scene: Scene) -> Any:
    """Two saves fail in the background, one does not; what the polls raise, and the counter after each."""
    found = []
    for step, failing in enumerate((True, True, False)):
        request = scene.request(f"step_{step}", state(step))
        if failing:
            del scene.held[f"step_{step}"]
            if scene.rank == 1:
                request = request._replace(async_fn=fail)
        scene.queue.schedule_async_request(request)
        error, by_poll = poll_until_raised(scene)
        if not failing:
            scene.finish()
        found.append((error, by_poll, getattr(scene.queue, "consecutive_failures", None)))
    return found


def too_few_results(scene: Scene, how: Any, create: bool) -> Any:
    """Rank 1 writes everything and reports less."""
    if create:
        scene.strategy = Job(directory="", create=str(scene.directory / "own.metadata")).strategy()
    request = scene.request("bad", state(1))
    del scene.held["bad"]
    if scene.rank == 1:
        request = request._replace(async_fn=partial(how, request.async_fn))
    scene.queue.schedule_async_request(request)
    failure = error_of(scene.finish)
    dist.barrier()
    found = published(scene.directory / "bad")
    scene.schedule("good", 2)
    return failure, found, len(scene.finish())


class Unpicklable:
    """Raises torch's own exception, which is no ``Exception``, where rank 1 plans."""

    def __init__(self, armed: bool) -> None:
        self._armed = armed

    def __reduce__(self) -> Any:
        if self._armed:
            raise CheckpointException("planning", {})
        return (str, ())

    def __deepcopy__(self, _memo: Any) -> "Unpicklable":
        return self


def torchs_exception_alone(scene: Scene) -> Any:
    """As a rank plans without its peers: nothing of it may raise here."""
    bait = ShardedObject("bait", Unpicklable(True), (1,), (0,))
    directory = scene.directory / f"alone_{scene.rank}"
    directory.mkdir()
    try:
        scene.strategy.async_save({"bait": bait}, directory)
    except BaseException as error:
        return f"{type(error).__name__} left the rank"
    return "voted"


def released(scene: Scene) -> Any:
    """An offload has taken the memory of a tensor of rank 1 when it is saved."""
    state_dict = state(1)
    if scene.rank == 1:
        state_dict["moment"].data.untyped_storage().resize_(0)
    directory = scene.directory / "bad"
    directory.mkdir(exist_ok=True)
    dist.barrier()
    request = dist_checkpointing.save(state_dict, str(directory), scene.strategy, async_sharded_save=True)
    scene.queue.schedule_async_request(request)
    failure = scene.failure(scene.finish)
    scene.schedule("step_2", 2)
    return failure, len(scene.finish())


# Scenarios: what becomes visible when.


def blocked_writer(scene: Scene) -> Any:
    """Two saves whose writers stand still: what is visible, and what the tracker says when each is finalized."""
    gates = [scene.directory / f"gate_{step}" for step in (1, 2)]
    for step, gate in enumerate(gates, start=1):
        scene.queue.schedule_async_request(behind(gate, with_tracker(scene, f"step_{step}", step)))
    seen = [polled_and_seen(scene, in_flight=2)]
    for done, gate in enumerate(gates, start=1):
        dist.barrier()
        gate.touch()
        seen.append(polled_and_seen(scene, in_flight=2 - done))
    return seen


def polled_and_seen(scene: Scene, in_flight: int) -> Any:
    """Poll until so many saves are in flight, a few times at least; the tracker, and which steps are published."""
    for polls in range(500):  # a number and no deadline: the ranks must poll alike
        if polls > 5 and scene.queue.get_num_unfinalized_calls() <= in_flight:
            break
        scene.queue.maybe_finalize_async_calls()
        time.sleep(0.02)
    dist.barrier()
    found = tracker(scene.directory), [published(scene.directory / f"step_{step}") for step in (1, 2)]
    dist.barrier()
    return found


def failed_save_and_tracker(scene: Scene) -> Any:
    """The tracker after a save, after one that fails, and after one whose finalizer before the tracker fails."""
    found = []
    for step, fault in ((1, None), (2, "write"), (3, "finalizer")):
        request = with_tracker(scene, f"step_{step}", step)
        if fault == "write":
            del scene.held["step_2"]
            if scene.rank == 1:
                request = request._replace(async_fn=fail)
        elif fault == "finalizer" and scene.rank == 0:
            request.finalize_fns.insert(-1, fail)
        scene.queue.schedule_async_request(request)
        error = error_of(scene.finish)
        dist.barrier()
        found.append((error, tracker(scene.directory)))
        dist.barrier()
    return found


STALE = (
    *("__0_0.distcp", "__0_7.distcp", "__1_0.distcp", "__1_3.distcp", "__2_0.distcp", "__15_1.distcp"),
    *(".metadata", "metadata.json", ".metadata.0123456789ab.tmp", "metadata.json.0123456789ab.tmp"),
)
"""What a larger job of ours that died can leave."""
STALE_OF_TORCH = (".metadata.tmp",)
"""What a save of torch's or NVRx's that died while it published can leave."""


def over_a_crashed_attempt(scene: Scene, stale: tuple[str, ...]) -> Any:
    directory = scene.directory / "step_1"
    if scene.rank == 0:
        directory.mkdir()
        for name in stale:
            (directory / name).write_bytes(b"of an attempt that died")
    dist.barrier()
    scene.schedule("step_1", 1)
    scene.finish()
    del scene.held["step_1"]
    dist.barrier()
    return sorted(path.name for path in directory.iterdir())


# Scenarios: memory.


def large(seed: int, count: int = 2) -> dict[str, Any]:
    """A state dict of tensors of 16 MiB."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        f"large_{number}": ShardedTensor.from_rank_offsets(
            f"large_{number}", torch.full((LARGE,), float(seed)), (0, rank, world)
        )
        for number in range(count)
    }


def references(scene: Scene, **how: Any) -> Any:
    """Tensors of three saves, the second of which fails, whose memory is held: before the end of each, and after it."""
    scene.reuse(**how)
    found = []
    for step in (1, 2, 3):
        state_dict = state(step)
        memories = watched(state_dict)
        request = scene.request(f"step_{step}", state_dict)
        if step == 2:
            del scene.held["step_2"]
            request = request._replace(async_fn=fail)
        held = still_in_use(memories)
        scene.queue.schedule_async_request(request)
        del request, state_dict
        error_of(scene.finish)
        found.append((held, still_in_use(memories)))
    return found


def memory(scene: Scene) -> Any:
    """Of each of three large saves: bytes that the writer shares with the trainer meanwhile, and what is left of it.

    Left: bytes more than before the first save, in the writer, and in shared memory on either side.
    """
    scene.strategy = Job(directory="", create=str(scene.directory / "own.metadata")).strategy()
    pid = pid_of_writer(scene.queue, scene.directory)
    before, shared_before = resident_bytes(pid), shared_bytes() + shared_bytes(pid)
    found = []
    for step in (1, 2, 3):
        state_dict = large(step)
        gate = scene.directory / f"gate_{step}"
        request = behind(gate, scene.request(f"step_{step}", state_dict))
        del scene.held[f"step_{step}"]
        scene.queue.schedule_async_request(request)
        del request, state_dict
        in_flight = shared_bytes(pid)
        gate.touch()
        scene.finish()
        found.append((in_flight, resident_bytes(pid) - before, shared_bytes(pid) + shared_bytes() - shared_before))
    return found


# Scenarios: what two saves and two processes share.


def two_requests(scene: Scene) -> Any:
    """How many lists, dictionaries and other parts of two requests are one object; and the writer's idea of CUDA."""
    requests = []
    for number in (1, 2):
        directory = scene.directory / f"planned_{number}"
        directory.mkdir(exist_ok=True)
        dist.barrier()
        requests.append(scene.strategy.async_save(state(number), directory))
    plain = [AsyncRequest(note, (), []) for _ in range(2)]
    shared = [mutable_parts(first) & mutable_parts(second) for first, second in (requests, plain)]
    path = scene.directory / f"cuda_{scene.rank}"
    scene.queue.schedule_async_request(AsyncRequest(write_cuda, (path,), []))
    scene.finish()
    return [len(each) for each in shared], path.read_text()


def mutable_parts(request: Any) -> set[int]:
    """Identities of the request's lists and dictionaries, its commit, and what those are made of."""
    parts = [request.finalize_fns, request.async_fn_args, request.async_fn_kwargs, *request.finalize_fns]
    return {id(part) for part in parts if part is not None and part != ()}


# Scenarios: groups.


def groups_of_a_save(scene: Scene) -> Any:
    """Groups that communicate in a save with all ranks, one that reuses, one that fails; the default group's name."""
    group: Any = dist.new_group(backend="gloo")
    scene.strategy = Job(
        directory="", create=str(scene.directory / "own.metadata"), extra={"process_group": group}
    ).strategy()
    found = []
    for step in (1, 2, 3):
        request = scene.request(f"step_{step}", state(step))
        if step == 3:
            del scene.held["step_3"]
            request = request._replace(async_fn=fail)
        dist.barrier()
        watched = Groups()
        scene.queue.schedule_async_request(request)
        error_of(scene.finish)
        found.append(watched.used())
    return Groups.default(), str(group.group_name), found


def plan_of_a_save(scene: Scene) -> Any:
    """Groups that communicate while a save is planned, without Megatron around the strategy."""
    directory = scene.directory / "planned"
    directory.mkdir(exist_ok=True)
    dist.barrier()
    watched = Groups()
    request = scene.strategy.async_save(state(1), directory)
    used = watched.used()
    scene.queue.schedule_async_request(request)
    scene.finish()
    return used


ONE_QUEUE: dict[str, Callable[[Scene], Any]] = {
    "unequal_delays": unequal_delays,
    "hooks": hooks,
    "failing_hook_0": partial(failing_hook, where=0),
    "failing_hook_1": partial(failing_hook, where=1),
    "failing_callback_0": partial(failing_callback, where=0),
    "failing_callback_1": partial(failing_callback, where=1),
    "failures_in_a_row": failures_in_a_row,
    **{
        f"{name}_{'create' if create else 'reuse'}": partial(too_few_results, how=how, create=create)
        for name, how in (("one_less", partial(truncated, -1)), ("none", partial(truncated, 0)), ("silent", silent))
        for create in (True, False)
    },
    "torchs_exception_alone": torchs_exception_alone,
    "released": released,
    "blocked_writer": blocked_writer,
    "failed_save_and_tracker": failed_save_and_tracker,
    "over_a_crashed_attempt": partial(over_a_crashed_attempt, stale=STALE),
    "over_a_crashed_attempt_of_torchs": partial(over_a_crashed_attempt, stale=STALE_OF_TORCH),
    "references_plain": references,
    "references_cached": partial(references, cached_metadata=True),
    "references_shm": partial(references, cpu_shm_mode=True),
    "references_shm_cached": partial(references, **SHARED_BUFFERS),
    "memory": memory,
    "two_requests": two_requests,
    "groups_of_a_save": groups_of_a_save,
    "plan_of_a_save": plan_of_a_save,
}
