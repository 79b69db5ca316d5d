"""``CheckpointManager`` from the first save to the resume: content, collectives, retention, events, what it leaves."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensor_jobs import StateDict, Trainer, assert_complete, differing, everything_in, full
from manager_jobs import (
    Job,
    TwoLives,
    failure,
    is_complete,
    is_published,
    plain,
    steps_in,
    two_lives,
    until,
    without_gates,
)
from ranks import RankPool
from watching import resident_bytes
from workload import heard

from megatron_ckpt_ext import CheckpointManager
from megatron_ckpt_ext.collectives import CollectiveCounter, CollectiveSums
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.events import Event, Phase, read_events
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ROOT = Path(__file__).resolve().parents[1]
KINDS: dict[str, StateDict] = {"sync": {}, "thread": {"async_save": True}}


@pytest.fixture(scope="module", params=KINDS)
def lives(request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> TwoLives:
    return two_lives(ranks, tmp_path_factory.mktemp(request.param), **KINDS[request.param])


def is_asynchronous(lives: TwoLives) -> bool:
    return lives.directory.name.startswith("thread")


def test_every_step_is_the_state_before_its_save(lives: TwoLives) -> None:
    """Though all of it was changed right after ``save``, and a thread began to write only then."""
    for rank in (0, 1):
        for step, noted in lives.of_rank(rank).items():
            assert differing(everything_in(lives.directory / f"step_{step}"), noted.values) == []
            assert_complete(lives.directory / f"step_{step}")
            assert noted.published_by_save is not is_asynchronous(lives)


def test_a_job_resumes_from_the_newest_step(lives: TwoLives) -> None:
    expected = without_gates(lives.first[0].saves[3].values)
    for first, second in zip(lives.first, lives.second, strict=True):
        assert first.loaded[0] is None
        assert second.loaded[0] == 3
        assert differing(second.loaded[1], expected) == []


def test_saves_that_follow_the_layout_have_no_object_collectives(lives: TwoLives) -> None:
    vote_and_confirmation, with_wait = {"all_reduce": 2}, {"all_reduce": 3}
    for rank in (0, 1):
        saves = lives.of_rank(rank)
        assert saves[1].objects > 0
        assert [saves[step].objects for step in (2, 3, 4, 5)] == [0] * 4
        for step in (2, 3, 5):
            assert saves[step].background == (with_wait if is_asynchronous(lives) else {})
            assert saves[step].counts == ({} if is_asynchronous(lives) else vote_and_confirmation)
        # Synchronous or not, and, for a thread, that there is room; the vote and its confirmation are one thread's.
        assert {**saves[4].counts, **saves[4].background}.keys() == {"all_reduce"}
    assert PreparedMetadata.load(str(lives.directory / "prepared.metadata"), 1, 2).slice.locators


def test_on_saved_is_called_on_every_rank_once_a_step_is_complete(lives: TwoLives) -> None:
    for first, second in zip(lives.first, lives.second, strict=True):
        assert first.hooks == [(1, True), (2, True), (3, True)]
        assert second.hooks == [(4, True), (5, True)]
        assert [*first.warnings, *second.warnings] == []


def test_the_events_say_where_the_time_of_each_save_went(lives: TwoLives) -> None:
    phases = [Phase.WRITE, Phase.PUBLISH]
    if is_asynchronous(lives):
        phases += [Phase.STAGE, Phase.FENCE]
    for life in (*lives.first, *lives.second):
        for step, events in life.events.items():
            assert sorted(event.phase for event in events) == sorted(phases)
            seconds = {event.phase: event.seconds for event in events}
            assert 0 < seconds[Phase.WRITE] <= seconds[Phase.PUBLISH] <= life.saves[step].seconds
            assert {event.path for event in events} == {str(lives.directory / f"step_{step}")}
            for event in events:
                assert (event.bytes > 0) is (event.items > 0) is (event.phase is Phase.STAGE)


@dataclass(kw_only=True)
class Held:
    """A job whose two writes were held back."""

    polls: list[bool] = field(default_factory=list)
    first_published: list[bool] = field(default_factory=list)
    """When the first ``save`` has returned; when the second has."""
    second_published: list[bool] = field(default_factory=list)
    """When the second ``save`` has returned; after the first poll that is ``True``."""
    hooks: list[list[tuple[int, bool]]] = field(default_factory=list)
    """Before the first write could end, and at the end."""
    seconds: float = 0.0
    """From ``HELD`` before the first write could go on until the second ``save`` had returned."""
    events: list[Event] = field(default_factory=list)


HELD = 0.3
"""Seconds."""


def held_on_rank(directory: str) -> Held:
    """Two saves; the first can be written some time after the second was asked for."""
    held, events = Held(), f"{directory}/events"
    with Job(directory, async_save=True, events=events) as job:
        manager, first, second = job.manager, job.gate("first"), job.gate("second")
        manager.save(1, job.state(first))
        held.first_published.append(is_published(directory, 1))
        held.polls += [manager.poll(), manager.poll()]
        held.hooks.append(list(job.hooks))
        began = time.monotonic()
        timer = threading.Timer(HELD, first.path.touch)
        timer.start()
        manager.save(2, job.state(second))
        held.seconds = time.monotonic() - began
        timer.join()
        held.first_published.append(is_complete(directory, 1))
        held.second_published.append(is_published(directory, 2))
        held.polls.append(manager.poll())
        second.open()
        until(manager.poll)
        held.second_published.append(is_complete(directory, 2))
        held.polls.append(manager.poll())
        held.hooks.append(list(job.hooks))
    held.events = read_events(f"{events}.{dist.get_rank()}")
    return held


def test_at_most_one_save_is_in_flight_and_all_ranks_know_when_it_has_ended(ranks: RankPool, tmp_path: Path) -> None:
    for held in ranks.run(held_on_rank, str(tmp_path)):
        assert held.polls == [False, False, False, True]
        assert held.first_published == [False, True]
        assert held.second_published == [False, True]
        assert held.hooks == [[], [(1, True), (2, True)]]
        seconds = {(event.step, event.phase): event.seconds for event in held.events}
        assert HELD < seconds[1, Phase.WRITE] < seconds[1, Phase.PUBLISH]
        assert seconds[1, Phase.STAGE] <= seconds[1, Phase.PUBLISH] - HELD
        assert seconds[2, Phase.STAGE] <= held.seconds - HELD  # the wait for the first is not part of it


def changed_layout_on_rank(directory: str, settings: StateDict) -> list[Any]:
    """Create, then grow by a tensor in the second save; a third follows the new layout."""
    file, events = f"{directory}/prepared.metadata", f"{directory}/events"
    with (
        heard() as warnings,
        Job(directory, ckpt_metadata=file, ckpt_metadata_create=True, events=events, **settings) as job,
    ):
        job.noted(1)
        before = identity(file)
        grown = job.noted(2, grown=torch.arange(5.0))
        after = identity(file)
        again = job.noted(3, grown=torch.arange(5.0) + 1)
    told = read_events(f"{events}.{dist.get_rank()}")
    rebuilds = [(event.step, event.reason) for event in told if event.phase is Phase.REBUILD]
    counts = {step: CollectiveSums.of(*(event.collectives for event in told if event.step == step)) for step in (2, 3)}
    return [grown, again, before != after, rebuilds, warnings, counts]


def identity(file: str) -> str:
    return PreparedMetadata.load(file, dist.get_rank(), dist.get_world_size()).identity


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_layout_is_made_anew_in_the_same_save(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    for rank, found in enumerate(ranks.run(changed_layout_on_rank, str(tmp_path), KINDS[kind])):
        grown, again, rewritten, rebuilds, warnings, counts = found
        assert grown.objects == counts[2].objects > 0
        assert again.objects == counts[3].objects == 0
        assert rewritten
        assert [(step, "grown" in reason) for step, reason in rebuilds] == [(2, True)]
        assert len(warnings) == (1 if rank == 0 else 0)
        for step, noted in ((2, grown), (3, again)):
            assert differing(everything_in(tmp_path / f"step_{step}"), noted.values) == []


def resumed_on_rank(directory: str, settings: StateDict) -> StateDict:
    """Steps 1 to 3, of which the last lost its ``.metadata``; then a job that resumes from what is left."""
    found: StateDict = {}
    with Job(directory, **settings) as job:
        found["nothing"] = job.manager.latest_complete_step(), job.manager.load(job.trainer.state())
        found["saved"] = [job.noted(step).values for step in (1, 2, 3)]
    dist.barrier()
    Path(directory, "step_3", ".metadata").unlink(missing_ok=True)
    dist.barrier()
    with Job(directory, seed=2, **settings) as job:
        manager, state = job.manager, job.trainer.state()
        with heard() as found["skipped"]:
            found["latest"] = manager.latest_complete_step()
        found["asked"] = refusal(lambda: manager.load(state, step=3)), refusal(lambda: manager.load(state, step=7))
        found["one"] = manager.load(state, step=1), full(state)
        found["newest"] = manager.load(state), full(state)
        before = files(directory, 2)
        with heard() as found["again"]:
            manager.save(2, job.trainer.state())
            found["nothing in flight"] = manager.poll()
        found["untouched"] = files(directory, 2) == before
        found["back"] = refusal(lambda: manager.save(1, job.trainer.state()))
        found["negative"] = refusal(lambda: manager.save(-1, job.trainer.state()))
        job.noted(3)
        found["back again"] = refusal(lambda: manager.save(2, job.trainer.state()))
    return found


def refusal(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except ConfigurationError as error:
        return str(error)
    return None


def files(directory: str, step: int) -> list[tuple[str, int, int]]:
    """Name, inode and time of change of each file of a checkpoint."""
    found = ((path.name, path.stat()) for path in Path(directory, f"step_{step}").iterdir())
    return sorted((name, status.st_ino, status.st_mtime_ns) for name, status in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_takes_complete_steps_only_and_steps_go_up(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    by_rank = ranks.run(resumed_on_rank, str(tmp_path), KINDS[kind])

    for rank, found in enumerate(by_rank):
        assert found["nothing"] == (None, None)
        assert found["latest"] == 2
        assert found["asked"] == by_rank[0]["asked"]
        assert "step 3 was asked for" in found["asked"][0]
        assert "step 7 was asked for" in found["asked"][1]
        for name, step in (("one", 1), ("newest", 2)):
            assert found[name][0] == step
            assert differing(found[name][1], without_gates(found["saved"][step - 1])) == []
        assert found["nothing in flight"]
        assert found["untouched"]
        assert "step 1 cannot be saved" in found["back"]
        assert "the newest here is 2" in found["back"]
        assert "-1 is no number of a step" in found["negative"]
        assert "the newest here is 3" in found["back again"]
        said = [len(found["skipped"]), len(found["again"])]
        assert said == ([1, 1] if rank == 0 else [0, 0])
    assert "step_3" in by_rank[0]["skipped"][0]
    assert "Step 2 is saved already" in by_rank[0]["again"][0]
    assert_complete(tmp_path / "step_3")


def retained_on_rank(directory: str, settings: StateDict) -> StateDict:
    """Save with an abandoned newer step and what is not ours in the directory."""
    place, events = Path(directory), f"{directory}/events"
    found: StateDict = {}
    with Job(directory, keep_last=1, events=events, **settings) as job:
        job.noted(1)
        gate = job.gate("second")
        job.manager.save(2, job.state(gate))
        dist.barrier()
        found["in flight"] = is_complete(directory, 1), is_complete(directory, 2)
        gate.open()
        job.manager.wait()
        dist.barrier()
        found["ended"] = steps_in(place), job.manager.latest_complete_step()
        dist.barrier()
        job.noted(9)
        dist.barrier()
        found["abandoned is saved"] = steps_in(place)
        dist.barrier()
    with Job(directory, keep_last=1, keep_interval=20, events=events, **settings) as job:
        job.manager.load(job.trainer.state())
        for step in (20, 30, 40, 50):
            job.noted(step)
        dist.barrier()
        found["interval"] = steps_in(place)
        dist.barrier()
    with Job(directory, keep_last=1, events=events, **settings) as job:
        job.manager.load(job.trainer.state(), step=20)
        job.noted(25)
        dist.barrier()
        found["gone back"] = steps_in(place)
    found["events"] = [
        (event.step, event.items, event.reason)
        for event in read_events(f"{events}.{dist.get_rank()}")
        if event.phase is Phase.RETAIN
    ]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_retention_counts_complete_steps_up_to_the_finalized_one(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    foreign = ["step_007", "step_3", "step_latest"]
    (tmp_path / "step_9").mkdir()
    (tmp_path / "step_9" / "__0_0.distcp").write_bytes(b"half of it")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step_3").symlink_to(tmp_path / "elsewhere")
    for name in ("step_007", "step_latest", "iter_0000001"):
        (tmp_path / name).mkdir()

    by_rank = ranks.run(retained_on_rank, str(tmp_path), KINDS[kind])

    for found in by_rank:
        assert found["in flight"] == ((False, True) if kind == "sync" else (True, False))
        assert found["ended"] == (sorted([*foreign, "step_2", "step_9"]), 2)
        assert found["abandoned is saved"] == sorted([*foreign, "step_9"])
        assert found["interval"] == sorted([*foreign, "step_20", "step_40", "step_50"])
        assert found["gone back"] == sorted([*foreign, "step_25", "step_40", "step_50"])
    removed = {1: 0, 2: 1, 9: 1, 20: 1, 30: 0, 40: 1, 50: 0, 25: 1}
    assert by_rank[0]["events"] == [(step, count, None) for step, count in removed.items()]
    assert by_rank[1]["events"] == []
    assert (tmp_path / "elsewhere").is_dir()
    assert (tmp_path / "iter_0000001").is_dir()


def side_by_side_on_rank(directory: str) -> tuple[StateDict, list[bool]]:
    """Two managers, both with a save in flight; the later one ends first. Then another save of each."""
    places = [f"{directory}/actor", f"{directory}/critic"]
    with Job(places[0], seed=1, async_save=True) as actor, Job(places[1], seed=2, async_save=True) as critic:
        values, gates = {}, {}
        for step in (1, 2):
            for place, job in zip(places, (actor, critic), strict=True):
                job.trainer.step()
                gate = gates[place] = job.gate(f"gate_{step}")
                values[f"{place}/step_{step}"] = job.whole(gate)
                job.manager.save(step, job.state(gate))
            seen = [actor.manager.poll(), critic.manager.poll()]
            gates[places[1]].open()
            critic.manager.wait()
            seen.append(actor.manager.poll())
            gates[places[0]].open()
            actor.manager.wait()
        actor.manager.close()
        actor.manager.close()
    return values, seen


def test_two_managers_save_side_by_side(ranks: RankPool, tmp_path: Path) -> None:
    for values, seen in ranks.run(side_by_side_on_rank, str(tmp_path)):
        assert seen == [False, False, False]
        assert len(values) == 4
        for directory, expected in values.items():
            assert differing(everything_in(Path(directory)), expected) == []


STATE = 32 << 20
"""Bytes that a rank stages."""
LITTLE = 8 << 20


class CountingMemory:
    """Plain memory whose pieces are counted."""

    def __init__(self) -> None:
        self.allocated = self.freed = self.bytes = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.allocated += 1
        self.bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def free(self, tensor: torch.Tensor) -> None:
        self.freed += 1
        self.bytes -= tensor.numel()


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a process holds."""

    memory: int
    descriptors: int
    threads: int
    shared: list[str]

    @classmethod
    def now(cls) -> "Footprint":
        return cls(
            memory=resident_bytes(os.getpid()),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            shared=sorted(os.listdir("/dev/shm")),
        )


def ten_saves_on_rank(directory: str, settings: StateDict) -> StateDict:
    """Ten saves of a large state after one of another manager, which pays for what a process loads once."""
    trainer = Trainer(seed=1)
    large = {f"large.{dist.get_rank()}": torch.zeros(STATE // 4)}
    memory = CountingMemory()
    found: StateDict = {"allocated": [], "bytes": []}
    with CheckpointManager(f"{directory}/warm", allocator=CountingMemory(), **settings) as manager:
        manager.save(1, {**trainer.state(), **large})
    dist.barrier()
    before = Footprint.now()
    with CheckpointManager(directory, keep_last=1, allocator=memory, **settings) as manager:
        for step in range(10):
            manager.save(step, {**trainer.state(), **large})
            found["allocated"].append(memory.allocated)
            found["bytes"].append(memory.bytes)
    dist.barrier()
    after = Footprint.now()
    found["left"] = {
        "memory": after.memory - before.memory,
        "descriptors": after.descriptors - before.descriptors,
        "threads": after.threads - before.threads,
        "shared": [name for name in after.shared if name not in before.shared],
    }
    found["freed"] = memory.freed
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_allocated_once_and_nothing_is_left(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    for found in ranks.run(ten_saves_on_rank, str(tmp_path), KINDS[kind]):
        first = found["allocated"][0]
        assert found["allocated"] == [first] * 10
        if kind == "thread":
            assert first > 1
            assert STATE <= found["bytes"][-1] < 1.1 * STATE
        assert found["freed"] == first
        left = found["left"]
        assert left["memory"] < LITTLE
        # What earlier tests left in the process may go meanwhile.
        assert left["descriptors"] <= 0 and left["threads"] <= 0 and left["shared"] == []
    assert steps_in(tmp_path) == ["step_9"]


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_process_group(tmp_path: Path, kind: str) -> None:
    """Create, follow, resume and retain; no collectives of any kind."""
    file = str(tmp_path / "prepared.metadata")
    with CollectiveCounter() as counter:
        for first, create in ((1, True), (3, False)):
            settings = {"ckpt_metadata": file, "ckpt_metadata_create": create, **KINDS[kind]}
            with CheckpointManager(tmp_path, keep_last=2, progress=False, **settings) as manager:
                found = plain(0.0)
                resumed = manager.load(found)
                for step in (first, first + 1):
                    state = plain(float(step))
                    manager.save(step, state)
                    state["weight"].fill_(-1)
                    manager.wait_for_staging()
                manager.wait()
                assert manager.poll()
            assert failure(manager.close) is None
            if first == 3:
                assert resumed == 2
                assert differing(found, plain(2.0)) == []
    assert counter.totals() == {}
    assert steps_in(tmp_path) == ["step_3", "step_4"]
    for step in (3, 4):
        assert differing(everything_in(tmp_path / f"step_{step}"), plain(float(step))) == []


def test_with_a_subdirectory(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, subdirectory="trainer", keep_last=1, async_save=True, progress=False) as manager:
        (tmp_path / "step_1" / "dataloader").mkdir(parents=True)
        for step in (1, 2, 3):
            manager.save(step, plain(float(step)))
        manager.wait()
        assert manager.latest_complete_step() == 3
    assert_complete(tmp_path / "step_3" / "trainer")
    assert steps_in(tmp_path) == ["step_1", "step_3"]
    assert [path.name for path in (tmp_path / "step_1").iterdir()] == ["dataloader"]


PROGRAM = """
import sys, threading
from pathlib import Path
from manager_jobs import Gate, plain
from megatron_ckpt_ext import CheckpointManager
folder, opened = Path(sys.argv[1]), []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
manager = CheckpointManager(
    folder,
    async_save=True,
    keep_interval=1,
    files_per_rank=2,
    on_saved=lambda step: print("saved", step, flush=True),
)
for step in (1, 2, 3, 4):
    manager.save(step, plain(float(step)))
manager.wait()
print("read", opened.count(str(folder / "step_2" / ".metadata")), flush=True)
manager.save(5, {**plain(5.0), "gate": Gate(folder / "gate")})
timer = threading.Timer(0.5, (folder / "gate").touch)
timer.daemon = True
timer.start()
print("end", flush=True)
"""


def test_the_last_save_is_waited_for_at_the_end_of_the_process(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=90, check=False)

    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    *saved, read, end, last = ended.stdout.splitlines()
    assert (saved, end, last) == ([f"saved {step}" for step in (1, 2, 3, 4)], "end", "saved 5")
    assert read == "read 1"  # retention judges a step that stays once, not with each save
    assert_complete(tmp_path / "step_5")
    assert differing(everything_in(tmp_path / "step_5"), {**plain(5.0), "gate": "gate"}) == []
