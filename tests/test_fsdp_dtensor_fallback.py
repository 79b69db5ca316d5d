"""Asynchronous saves that are asked for and not possible: the same checkpoint, written once, and one warning."""

import importlib.metadata
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from dtensor_jobs import (
    FINALIZE,
    INLINE,
    SAVE,
    Seen,
    StateDict,
    Trainer,
    assert_complete,
    differing,
    everything_in,
    saved,
)
from ranks import RankPool
from workload import heard

from megatron_ckpt_ext.commit.commit import How
from megatron_ckpt_ext.commit.failures import PublishFailedError, WriteFailedError
from megatron_ckpt_ext.compat import megatron_training
from megatron_ckpt_ext.strategy.fsdp_dtensor import FinishedSave, FsdpDtensorSaver, save_fsdp_dtensor
from megatron_ckpt_ext.strategy.fsdp_dtensor_mode import Facts, decide_mode, find_facts
from megatron_ckpt_ext.write.worker import WorkerSettings
from megatron_ckpt_ext.write.writer import Writer

TESTS = Path(__file__).resolve().parent
REUSED, TOGETHER = How.REUSED.value, How.TOGETHER.value
WARNING = "Checkpoints are saved synchronously, though asynchronous saves were asked for: "


def sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.iterdir() if path.suffix == ".distcp"}


def save_inline_on_rank(directory: str) -> StateDict:
    trainer = Trainer(seed=5)
    with FsdpDtensorSaver(mode=INLINE) as saver:
        seen = saved(saver, f"{directory}/stock", trainer.state())
    return seen.values


def test_without_nvrx_the_same_files_are_written_by_torch_alone(ranks: RankPool, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "dtensor_without_nvrx.py")]
    jobs = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        expected = ranks.run(save_inline_on_rank, str(tmp_path))[0]
        lines = [job.communicate(timeout=100)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0]
    found: list[dict[str, Any]] = [json.loads(text.splitlines()[-1]) for text in lines]

    for rank, each in enumerate(found):
        assert each["kinds"] == [FinishedSave.__name__] * 2
        assert each["how"] == [TOGETHER, REUSED]
        assert each["save"][1] == {"all_reduce": 2}
        assert each["nvrx"] == []
        assert [text.startswith(WARNING) for text in each["warnings"]] == ([True] if rank == 0 else [])
    for name in ("step_1", "step_2"):
        assert_complete(tmp_path / name)
        assert sizes(tmp_path / name) == sizes(tmp_path / "stock")
        assert differing(everything_in(tmp_path / name), expected) == []


def old_version(directory: str) -> dict[str, Any]:
    """An installation of NVRx 0.5.0, as far as Python's own look-up goes."""
    place = Path(directory, "site", "nvidia_resiliency_ext-0.5.0.dist-info")
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-resiliency-ext\nVersion: 0.5.0\n")
    sys.path.insert(0, str(place.parent))
    return {}


def cannot_start(directory: str) -> dict[str, Any]:
    def start(settings: WorkerSettings, timeout: timedelta) -> Writer:
        raise OSError("no more processes")

    return {"start_writer": start}


def dies_at_once(directory: str) -> dict[str, Any]:
    return {"settings": lambda: WorkerSettings(rank=1, cuda_device=99)}


OBSTACLES = {
    old_version: "nvidia-resiliency-ext 0.5.0 is installed, 0.6 or later is needed, on rank 1",
    cannot_start: "no writer process can be started (OSError: no more processes), on rank 1",
    dies_at_once: "the writer process does not work (staging failed: the writer process ended with exit code 1), "
    "on rank 1",
}


def obstructed_on_rank(directory: str) -> dict[str, tuple[list[Seen], list[str], str]]:
    """Every obstacle on rank 1 alone; each job saves twice."""
    found = {}
    for obstacle in OBSTACLES:
        place, path = f"{directory}/{obstacle.__name__}", list(sys.path)
        settings = obstacle(place) if dist.get_rank() == 1 else {}
        trainer = Trainer(seed=6)
        with heard() as warnings, FsdpDtensorSaver(**settings) as saver:
            sys.path[:] = path
            seen = [saved(saver, f"{place}/{number}", trainer.state()) for number in (1, 2)]
        found[obstacle.__name__] = (seen, warnings, saver.mode.reason)
    return found


def test_an_obstacle_on_one_rank_is_a_decision_of_all(ranks: RankPool, tmp_path: Path) -> None:
    by_rank = ranks.run(obstructed_on_rank, str(tmp_path))

    for rank, found in enumerate(by_rank):
        for obstacle, reason in OBSTACLES.items():
            seen, warnings, said = found[obstacle.__name__]
            assert [each.kind for each in seen] == [FinishedSave.__name__] * 2
            assert [each.how for each in seen] == [TOGETHER, REUSED]
            assert seen[1].counts == {SAVE: {"all_reduce": 2}}
            assert FINALIZE not in seen[0].counts
            assert said == reason
            assert warnings == ([f"{WARNING}{reason}."] if rank == 0 else [])
            for number, each in enumerate(seen, start=1):
                directory = tmp_path / obstacle.__name__ / str(number)
                assert_complete(directory)
                assert differing(everything_in(directory), each.values) == []


def in_the_way_on_rank(directory: str) -> list[str]:
    """Something lies where rank 1 writes; then, where the coordinator publishes."""
    errors = []
    for name in ("__1_0.distcp", ".metadata"):
        target = Path(directory, name.strip("._"))
        (target / name / "in the way").mkdir(parents=True, exist_ok=True)
        dist.barrier()
        try:
            save_fsdp_dtensor(Trainer(seed=6).state(), target, async_save=False)
        except WriteFailedError as error:
            errors.append(str(error))
    return errors


def test_a_synchronous_save_fails_on_every_rank_alike(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(in_the_way_on_rank, str(tmp_path))

    assert first == second
    assert len(first) == 2
    assert "rank 1" in first[0]


class InTheWay:
    """Puts something where the checkpoint is to be published, while it is written; all ranks have planned by then."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        dist.barrier()
        if dist.get_rank() == 0:
            Path(self.directory, ".metadata", "in the way").mkdir(parents=True)
        return (str, ("",))


def unpublished_on_rank(directory: str) -> list[str]:
    """The coordinator alone cannot rename, after all have agreed; the next save is planned together and in order."""
    found, model = [], Trainer(seed=6).state()
    with FsdpDtensorSaver(async_save=False) as saver:
        for number in range(3):
            place = f"{directory}/{number}"
            try:
                note = {f"note.{dist.get_rank()}": InTheWay(place) if number == 1 else ""}
                saved(saver, place, {**model, **note}, whole=False)
                found.append("published")
            except PublishFailedError as error:
                found.append(str(error))
    return found


def test_a_rename_that_fails_on_the_coordinator_is_an_error_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(unpublished_on_rank, str(tmp_path))

    assert first == second
    assert (first[0], first[2]) == ("published", "published")
    assert "rank 0: publishing failed: " in first[1]
    assert_complete(tmp_path / "2")


@pytest.mark.parametrize(
    ("facts", "asynchronous", "reason"),
    [
        (Facts(async_save=False, nvrx=None), False, "asynchronous saves were not asked for"),
        (Facts(async_save=True, nvrx="0.7.0"), True, "asynchronous saves were asked for"),
        (Facts(async_save=True, nvrx=None), False, "nvidia-resiliency-ext is not installed"),
        (Facts(async_save=True, nvrx="a fork"), True, "asynchronous saves were asked for"),
        (Facts(async_save=True, nvrx="0.5.0"), False, "nvidia-resiliency-ext 0.5.0 is installed, 0.6 or later"),
        (Facts(async_save=True, nvrx="0.7.0", problem="no process"), False, "no process"),
    ],
)
def test_the_decision_says_why(facts: Facts, asynchronous: bool, reason: str) -> None:
    mode = decide_mode(facts)

    assert mode.asynchronous is asynchronous
    assert mode.reason.startswith(reason)
    assert mode.is_fallback is (facts.async_save and not asynchronous)


@pytest.mark.parametrize(("version", "is_tried"), [("0.7.0", True), ("a fork", True), ("0.5.0", False)])
def test_only_a_version_that_may_do_is_imported(monkeypatch: pytest.MonkeyPatch, version: str, is_tried: bool) -> None:
    monkeypatch.setitem(sys.modules, "megatron_ckpt_ext.compat.nvrx", None)

    facts = find_facts(async_save=True, version=lambda: version)

    assert facts.problem.startswith("nvidia-resiliency-ext cannot be imported (") is is_tried
    assert decide_mode(facts).is_fallback


@pytest.mark.parametrize("version", ["0.4.1", "0.5.0"])
def test_what_is_installed_and_what_a_job_decides_are_one_check(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata.Distribution, "version", version)

    assert megatron_training.nvrx_version() == version
    assert megatron_training.unsupported_reason() == decide_mode(find_facts(async_save=True)).reason
    assert version in decide_mode(find_facts(async_save=True)).reason
