"""Saves of ``CheckpointManager`` that fail: every rank hears of it, once, and the next save is in order."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensor_jobs import StateDict, assert_complete, differing, everything_in
from manager_jobs import Gate, Job, Unwritable, failure, is_complete, only_on, plain, steps_in, until
from ranks import RankPool

from megatron_ckpt_ext import CheckpointManager, ManagerConfig
from megatron_ckpt_ext.errors import ConfigurationError

KINDS: dict[str, StateDict] = {"sync": {}, "thread": {"async_save": True}}
DISK_FULL = "WriteFailedError: checkpoint save failed (write), nothing was published. rank 1: OSError: writing failed: "


def surfacing_on_rank(directory: str) -> StateDict:
    """A write that fails on rank 1, seen at each place where it may surface; each time the step is saved again."""
    found: StateDict = {"places": {}, "values": {}}
    with Job(directory, async_save=True) as job:
        manager = job.manager

        def fail(step: int, name: str) -> str | None:
            """Save what rank 1 cannot write; return what that raised."""
            gate = job.gate(name)
            told = failure(lambda: manager.save(step, job.state(gate, **only_on(1, Unwritable()))))
            gate.open()
            return told

        job.noted(0, **only_on(1, "good"))
        places = {
            "poll": lambda: until(manager.poll),
            "wait": manager.wait,
            "save": lambda: manager.save(99, {}),
            "load": lambda: manager.load(job.state()),
        }
        for step, (name, surface) in enumerate(places.items(), start=1):
            returned, told = fail(step, name), failure(surface)
            again = failure(manager.wait), manager.poll()
            left = is_complete(directory, step)
            noted = job.noted(step, **only_on(1, f"again {step}"))
            found["places"][name] = returned, told, again, left, noted.objects
            found["values"][step] = {**noted.values, "own.0": "", "own.1": f"again {step}"}
        found["next"] = job.noted(50, **only_on(1, "again 50")).objects
        fail(51, "close")
        found["close"] = failure(manager.close), failure(manager.close)
    found["hooks"] = job.hooks
    return found


def test_a_failed_write_surfaces_once_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(surfacing_on_rank, str(tmp_path))

    assert first["places"] == second["places"]
    for returned, told, again, left, objects in first["places"].values():
        assert returned is None
        assert told.startswith(DISK_FULL)
        assert "the disk is full" in told
        assert again == (None, True)
        assert not left
        assert objects > 0  # a layout that was not published is not followed
    assert first["next"] == 0
    for step, expected in first["values"].items():
        assert differing(everything_in(tmp_path / f"step_{step}"), expected) == []
    assert first["close"] == second["close"]
    assert first["close"][0].startswith(DISK_FULL)
    assert first["close"][1] is None
    assert "step_99" not in steps_in(tmp_path)
    for found in (first, second):
        assert found["hooks"] == [(step, True) for step in (0, 1, 2, 3, 4, 50)]


def synchronous_on_rank(directory: str) -> StateDict:
    with Job(directory) as job:
        job.noted(1)
        told = failure(lambda: job.manager.save(2, job.state(**only_on(1, Unwritable()))))
        again = failure(job.manager.wait), job.manager.poll()
        left = is_complete(directory, 2)
        job.noted(2)
    return {"told": told, "again": again, "left": left, "hooks": job.hooks}


def test_a_failed_synchronous_save_is_raised_at_once_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(synchronous_on_rank, str(tmp_path))

    assert first == second
    assert first["told"].startswith(DISK_FULL)
    assert first["again"] == (None, True)
    assert not first["left"]
    assert first["hooks"] == [(1, True), (2, True)]
    assert_complete(tmp_path / "step_2")


LIMIT = 1 << 20


def large() -> torch.Tensor:
    return torch.zeros(LIMIT // 2)


class Uncopyable:
    """Fails to be copied into host memory."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("it cannot be copied")


OBSTACLES = {large: f"the budget is {LIMIT} bytes", Uncopyable: "own.1, a Uncopyable, cannot be copied"}


def refused_on_rank(directory: str) -> StateDict:
    """Rank 1 alone cannot stage the first save of a job, then a later one."""
    found: StateDict = {}
    for obstacle in OBSTACLES:
        place = f"{directory}/{obstacle.__name__}"
        with Job(place, async_save=True, staging_limit=LIMIT) as job:

            def save(step: int, value: Any) -> str | None:
                return failure(lambda: job.manager.save(step, job.state(**only_on(1, value))))

            first = save(1, obstacle()), job.manager.poll(), steps_in(Path(place))
            good = job.noted(1, **only_on(1, "small")).values
            gate = job.gate("before the refused one")
            job.manager.save(2, job.state(gate, **only_on(1, "small")))
            gate.open()
            later = save(3, obstacle()), failure(job.manager.wait), failure(job.manager.wait), is_complete(place, 3)
            job.noted(3, **only_on(1, "small"))
        found[obstacle.__name__] = first, later, {**good, "own.0": "", "own.1": "small"}
    return found


def test_what_one_rank_cannot_stage_fails_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    """In the first save before any file is made, later at the next wait."""
    by_rank = ranks.run(refused_on_rank, str(tmp_path))

    for obstacle, sentence in OBSTACLES.items():
        first, later, good = by_rank[0][obstacle.__name__]
        assert by_rank[1][obstacle.__name__][:2] == (first, later)
        told, nothing_in_flight, names = first
        assert told.startswith("WriteFailedError: ")
        assert "rank 1: staging failed: " in told
        assert sentence in told
        assert (nothing_in_flight, names) == (True, [])
        returned, told, again, left = later
        assert (returned, again, left) == (None, None, False)
        assert "rank 1: " in told
        assert sentence in told
        place = tmp_path / obstacle.__name__
        assert differing(everything_in(place / "step_1"), good) == []
        assert [is_complete(place, step) for step in (1, 2, 3)] == [True] * 3


def drifting_on_rank(directory: str, settings: StateDict) -> list[str | None]:
    """The layout changes where it must not, on one rank; then it is as before, and planned together."""
    file = f"{directory}/prepared.metadata"
    with Job(directory, ckpt_metadata=file, ckpt_metadata_create=True) as job:
        job.noted(1)
    settings = {"ckpt_metadata": file, "ckpt_metadata_on_drift": "fail", **settings}
    with Job(directory, **settings) as job:
        told = [failure(lambda: job.manager.save(2, job.state(**only_on(1, "more"))))]
        told.append(failure(job.manager.wait))
        told.append(failure(job.manager.wait))
        job.noted(3)
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_drift_that_is_to_fail_fails_on_every_rank(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    first, second = ranks.run(drifting_on_rank, str(tmp_path), KINDS[kind])

    assert first == second
    told = first[1] if kind == "thread" else first[0]
    assert told is not None
    assert told.startswith("MetadataReuseError: ")
    assert "own.0" in told
    assert [each for each in first if each is not None] == [told]
    assert not is_complete(tmp_path, 2)
    assert_complete(tmp_path / "step_3")


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_fails_does_not_fail_the_save(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def hook(step: int) -> None:
        raise ValueError("nobody listens")

    with CheckpointManager(tmp_path, on_saved=hook, progress=False, **KINDS[kind]) as manager:
        manager.save(1, plain(1.0))
        manager.wait()

    assert "on_saved(1) failed; the checkpoint is durable all the same" in caplog.text
    assert "nobody listens" in caplog.text
    assert_complete(tmp_path / "step_1")


def test_a_write_that_hangs_is_given_up(tmp_path: Path) -> None:
    """The next save has a thread and buffers of its own; what was given up may still appear, and is not reported."""
    gate = Gate(tmp_path / "gate")
    reported: list[int] = []
    manager = CheckpointManager(tmp_path, async_save=True, save_timeout=1.0, progress=False, on_saved=reported.append)
    manager.save(1, {**plain(1.0), "gate": gate})
    began = time.monotonic()
    told = failure(manager.wait)
    assert told is not None
    assert "the writer thread did not end within 1 s" in told
    assert time.monotonic() - began < 10
    assert failure(manager.wait) is None
    with pytest.raises(ConfigurationError, match="the save of step 1 was given up"):
        manager.save(1, plain(1.0))
    manager.save(2, plain(2.0))
    manager.wait()
    gate.path.touch()
    until(lambda: is_complete(tmp_path, 1))
    manager.close()
    assert reported == [2]
    assert differing(everything_in(tmp_path / "step_2"), plain(2.0)) == []
    with pytest.raises(RuntimeError, match="is closed"):
        manager.save(3, plain(3.0))


def refused_at_start_on_rank(directory: str) -> list[str]:
    """What only rank 1 cannot do, or has been told otherwise."""
    rank, told = dist.get_rank(), []
    blocked = Path(directory, "a file")
    blocked.touch()
    Path(directory, "events.1").mkdir(exist_ok=True)
    dist.barrier()
    attempts: list[tuple[str, StateDict]] = [
        (directory, {"events": f"{directory}/events"}),
        (str(blocked) if rank else directory, {}),
        (directory, {"keep_last": 1 + rank}),
        (directory, {"ckpt_metadata": f"{directory}/missing"}),
    ]
    for place, settings in attempts:
        began = time.monotonic()
        try:
            CheckpointManager(place, **settings).close()
            told.append("nothing")
        except ConfigurationError as error:
            told.append(str(error))
        told.append("at once" if time.monotonic() - began < 10 else "late")
        dist.barrier()
    return told


def test_what_cannot_be_is_told_to_every_rank_at_the_start(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(refused_at_start_on_rank, str(tmp_path), timeout=20)

    assert first == second
    assert first[1::2] == ["at once"] * 4
    sentences = first[::2]
    assert "cannot append to" in sentences[0]
    assert "events.1" in sentences[0]
    assert "a file" in sentences[1]
    assert "keep-last differs between ranks: 1 on rank 0, 2 on rank 1" in sentences[2]
    assert "no such file" in sentences[3]


def test_a_config_comes_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="pass keep_last in the config"):
        CheckpointManager(tmp_path, config=ManagerConfig(), keep_last=1)
