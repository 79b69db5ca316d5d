"""``CheckpointManager`` with NVRx's writer process, and what it does where there is none."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from dtensor_jobs import StateDict, assert_complete, differing, everything_in
from manager_jobs import (
    Job,
    Noted,
    Unwritable,
    failure,
    is_complete,
    is_published,
    only_on,
    steps_in,
    until,
)
from ranks import RankPool
from watching import children
from workload import heard

from megatron_ckpt_ext import CheckpointManager
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.events import Event, Phase, read_events

ROOT = Path(__file__).resolve().parents[1]
PROCESS: StateDict = {"async_save": True, "writer": "process"}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw of a job that resumes from a synchronous one; it has one writer process from start to end."""

    loaded: int | None
    saves: dict[int, Noted]
    polls: list[Any]
    told: list[str | None]
    """By the save of a step that rank 1 cannot write, and by two waits for it."""
    hooks: list[tuple[int, bool]]
    events: list[Event]
    warnings: list[str]
    processes: tuple[int, int]
    """More than before: while the job runs, and at its end."""


def job_on_rank(directory: str) -> Seen:
    """Steps 2 and 3 follow the layout, 4 is polled for, 5 fails and is saved again."""
    file, events = f"{directory}/prepared.metadata", f"{directory}/events"
    before = children()
    with Job(directory, ckpt_metadata=file, ckpt_metadata_create=True) as job:
        saves = {1: job.noted(1, **only_on(1, "1"))}
    with heard() as warnings, Job(directory, ckpt_metadata=file, keep_last=4, events=events, **PROCESS) as job:
        manager = job.manager
        loaded = manager.load(job.state())
        saves |= {step: job.noted(step, **only_on(1, f"{step}")) for step in (2, 3)}
        manager.save(4, job.state(**only_on(1, "4")))
        polls = [is_published(directory, 4), manager.poll(), len(job.hooks)]
        until(manager.poll)
        polls += [is_complete(directory, 4), len(job.hooks), manager.poll()]
        told = [failure(lambda: manager.save(5, job.state(**only_on(1, Unwritable()))))]
        told += [failure(manager.wait), failure(manager.wait)]
        saves |= {step: job.noted(step, **only_on(1, f"{step}")) for step in (5, 6)}
        processes = len(children() - before)
    until(lambda: children() <= before)
    return Seen(
        loaded=loaded,
        saves=saves,
        polls=polls,
        told=told,
        hooks=job.hooks,
        events=read_events(f"{events}.{dist.get_rank()}"),
        warnings=warnings,
        processes=(processes, len(children() - before)),
    )


@pytest.fixture(scope="module")
def job(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Seen]]:
    directory = tmp_path_factory.mktemp("process")
    return directory, ranks.run(job_on_rank, str(directory))


def test_every_step_that_is_kept_is_the_state_before_its_save(job: tuple[Path, list[Seen]]) -> None:
    directory, by_rank = job
    assert [seen.loaded for seen in by_rank] == [1, 1]
    for seen in by_rank:
        assert [seen.saves[step].published_by_save for step in (2, 3, 5, 6)] == [False] * 4
        for step in (3, 5, 6):
            expected = {**seen.saves[step].values, "own.0": "", "own.1": f"{step}"}
            assert differing(everything_in(directory / f"step_{step}"), expected) == []
    assert steps_in(directory) == ["step_3", "step_4", "step_5", "step_6"]


def test_saves_that_follow_the_layout_only_poll(job: tuple[Path, list[Seen]]) -> None:
    for seen in job[1]:
        assert [seen.saves[step].objects > 0 for step in (2, 3, 5, 6)] == [False, False, True, False]
        assert [seen.saves[step].counts for step in (3, 6)] == [{}, {}]
        assert [seen.saves[step].background.keys() for step in (2, 3, 6)] == [{"all_reduce"}] * 3


def test_polls_failures_and_hooks_are_those_of_a_thread(job: tuple[Path, list[Seen]]) -> None:
    first, second = job[1]
    for seen in (first, second):
        assert seen.polls == [False, False, 2, True, 3, True]
        assert seen.hooks == [(step, True) for step in (2, 3, 4, 5, 6)]
        assert seen.told == first.told
        running, left = seen.processes
        assert running >= 1
        assert left == 0
    told = [each for each in first.told if each is not None]
    assert len(told) == 1
    assert "rank 1: " in told[0]
    assert "the disk is full" in told[0]
    assert first.warnings == []
    assert [text.startswith("Rank 1 cannot plan its part of ") for text in second.warnings] == [True]


def test_the_events_are_those_of_a_thread(job: tuple[Path, list[Seen]]) -> None:
    for rank, seen in enumerate(job[1]):
        for step in (2, 3, 6):
            seconds = {event.phase: event.seconds for event in seen.events if event.step == step}
            phases = [Phase.STAGE, Phase.FENCE, Phase.WRITE, Phase.PUBLISH] + [Phase.RETAIN] * (rank == 0)
            assert sorted(seconds) == sorted(phases)
            assert 0 < seconds[Phase.STAGE] <= seconds[Phase.WRITE] <= seconds[Phase.PUBLISH]
            assert seconds[Phase.PUBLISH] <= seen.saves[step].seconds


def test_without_a_process_group_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="call init_process_group before"):
        CheckpointManager(tmp_path, **PROCESS)


PROGRAM = """
import logging, sys
how, folder = sys.argv[1:]
if how == "without_nvrx":
    sys.modules["nvidia_resiliency_ext"] = None
import torch, torch.distributed as dist
from pathlib import Path
from megatron_ckpt_ext import CheckpointManager
if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s")
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 1), rank=0, world_size=1)
    manager = CheckpointManager(
        folder,
        async_save=True,
        writer="process",
        events=folder + "/events",
        on_saved=lambda step: print("saved", step, flush=True),
    )
    for step in (1, 2):
        manager.save(step, {"weight": torch.full((3, 5), float(step)), "note": "here"})
        print("returned", step, Path(folder, f"step_{step}", ".metadata").exists(), flush=True)
"""
HOW = ("with_nvrx", "without_nvrx")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job of one rank that ended without closing its manager."""

    code: int
    output: list[str]
    errors: str
    folder: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Side by side, for each imports for seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = {}
    for how in HOW:
        folder = tmp_path_factory.mktemp(how)
        program = folder / "program.py"  # a file, for the writer process imports the main module
        program.write_text(PROGRAM)
        command = [sys.executable, str(program), how, str(folder)]
        out, err = subprocess.PIPE, subprocess.PIPE
        running[how] = (subprocess.Popen(command, stdout=out, stderr=err, text=True, env=environment), folder)
    found = {}
    try:
        for how, (process, folder) in running.items():
            output, errors = process.communicate(timeout=100)
            found[how] = Ended(code=process.returncode, output=output.splitlines(), errors=errors, folder=folder)
    finally:
        for process, _ in running.values():
            process.kill()
    return found


@pytest.mark.parametrize("how", HOW)
def test_the_last_save_is_durable_at_the_end_of_the_process(ended: dict[str, Ended], how: str) -> None:
    job = ended[how]

    assert job.code == 0, job.errors
    assert "Traceback" not in job.errors, job.errors
    for step in (1, 2):
        assert_complete(job.folder / f"step_{step}")
        assert everything_in(job.folder / f"step_{step}")["weight"].unique().tolist() == [step]
    if how == "with_nvrx":
        assert job.output == ["returned 1 False", "saved 1", "returned 2 False", "saved 2"]


def test_without_nvrx_saves_are_synchronous_after_one_warning(ended: dict[str, Ended]) -> None:
    job = ended["without_nvrx"]
    reason = "nvidia-resiliency-ext cannot be imported"

    assert job.output == ["saved 1", "returned 1 True", "saved 2", "returned 2 True"]
    warnings = [line for line in job.errors.splitlines() if line.startswith("WARNING Checkpoints")]
    assert [reason in line for line in warnings] == [True]
    events = read_events(str(job.folder / "events"))
    fallbacks = [event for event in events if event.phase is Phase.FALLBACK]
    assert [event.step for event in fallbacks] == [1, 2]
    assert all(reason in str(event.reason) for event in fallbacks)
    assert [event.step for event in read_events(str(ended["with_nvrx"].folder / "events"))] == [1] * 3 + [2] * 3
