"""``CheckpointManager`` in unusual company: other steps on other ranks, links, a terminal that is gone."""

import io
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensor_jobs import assert_complete, differing, everything_in
from manager_jobs import Gate, Job, failure, is_complete, plain, steps_in, until
from ranks import RankPool
from rich.console import Console

from megatron_ckpt_ext import CheckpointManager
from megatron_ckpt_ext.compat.dcp import FileWriter
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.manager.progress import ProgressDisplay
from megatron_ckpt_ext.strategy.fsdp_dtensor import FsdpDtensorSaver

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ASYNC: dict[str, Any] = {"async_save": True, "progress": False}


def different_steps_on_rank(directory: str) -> list[str | None]:
    """With a layout to follow, each rank saves another step; then all the same."""
    with Job(directory, async_save=True) as job:
        job.noted(1)
        job.manager.save(2 + dist.get_rank(), job.trainer.state())
        told = [failure(job.manager.wait)]
        job.noted(4)
        told.append(failure(job.manager.wait))
    return told


def test_ranks_that_save_different_steps_hear_of_it_and_publish_nothing(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(different_steps_on_rank, str(tmp_path))

    assert first == second
    assert "ranks vote on different checkpoint saves" in str(first[0])
    assert first[1] is None
    assert [is_complete(tmp_path, step) for step in (1, 2, 3, 4)] == [True, False, False, True]


def without_groups_on_rank(directory: str) -> bool:
    """All groups of a job are destroyed under its saver."""
    saver = FsdpDtensorSaver(async_save=False)
    saver.save({"weight": torch.ones(3)}, f"{directory}/1")
    dist.barrier()
    dist.destroy_process_group()
    try:
        saver.save({"weight": torch.ones(3)}, f"{directory}/2")
    except Exception:
        return True
    return False


def test_a_save_without_its_groups_is_not_one_of_as_many_jobs(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(without_groups_on_rank, str(tmp_path)) == [True, True]
    assert_complete(tmp_path / "1")
    assert not (tmp_path / "2" / ".metadata").exists()


def test_an_interrupted_wait_can_be_waited_for_again(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    with CheckpointManager(tmp_path, **ASYNC) as manager:
        manager.save(1, {**plain(1.0), "gate": gate})
        timer = threading.Timer(0.3, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            manager.wait()
        timer.join()
        assert manager.poll() is False
        gate.path.touch()
        manager.wait()
        assert is_complete(tmp_path, 1)


def test_a_complete_step_of_an_earlier_job_is_not_written_over(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, **ASYNC) as manager:
        manager.save(1, plain(1.0))
    with CheckpointManager(tmp_path, **ASYNC) as manager:
        with pytest.raises(ConfigurationError, match="is a complete checkpoint of an earlier job"):
            manager.save(1, plain(2.0))
        manager.save(2, plain(2.0))
    assert differing(everything_in(tmp_path / "step_1"), plain(1.0)) == []
    assert_complete(tmp_path / "step_2")


def test_a_step_that_is_a_link_is_not_written(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "theirs", **ASYNC) as manager:
        manager.save(2, plain(2.0))
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "step_2").symlink_to(tmp_path / "theirs" / "step_2")
    with (
        CheckpointManager(tmp_path / "ours", **ASYNC) as manager,
        pytest.raises(ConfigurationError, match="is a link, to what is somebody else's"),
    ):
        manager.save(2, plain(3.0))
    assert differing(everything_in(tmp_path / "theirs" / "step_2"), plain(2.0)) == []


def test_steps_ahead_of_the_one_that_was_loaded_are_not_counted(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, **ASYNC) as manager:
        for step in (20, 40, 60):
            manager.save(step, plain(float(step)))
    with CheckpointManager(tmp_path, keep_last=2, **ASYNC) as manager:
        assert manager.load(plain(0.0), step=20) == 20
        for step in (30, 50, 60):
            manager.save(step, plain(float(step)))
    assert steps_in(tmp_path) == ["step_40", "step_50", "step_60"]


class BrokenTerminal(io.StringIO):
    """A terminal that is gone."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_display_that_fails_decides_about_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    display = ProgressDisplay(enabled=True, console=Console(file=BrokenTerminal(), force_terminal=True))

    done = []
    for number in (1, 2):
        with display.writing(str(tmp_path), rank=0, total=1 << 20):
            done.append(number)

    assert done == [1, 2]
    assert "There is no progress display any more: OSError" in caplog.text
    assert len(caplog.records) == 1


def test_a_display_shows_what_is_written_and_leaves_the_trainers_output_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    display = ProgressDisplay(enabled=True, console=Console(file=screen, force_terminal=True, width=120))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(3 << 20))
    (tmp_path / "__1_0.distcp").write_bytes(bytes(1 << 20))

    with display.writing(str(tmp_path), rank=0, total=4 << 20):
        until(lambda: "3 of 4 MiB" in screen.getvalue())
        print("the trainer's own line")

    assert capsys.readouterr().out == "the trainer's own line\n"
    assert "the trainer's own line" not in screen.getvalue()


class Unpicklable:
    """Cannot be written."""

    def __reduce__(self) -> str:
        raise ValueError("this one cannot be written")


def test_what_goes_wrong_in_a_file_of_several_is_heard(tmp_path: Path) -> None:
    assert "_write_data" in vars(FileWriter)
    with CheckpointManager(tmp_path, files_per_rank=4, progress=False) as manager:
        state = {**{f"weight.{number}": torch.ones(9) for number in range(8)}, "wrong": Unpicklable()}
        told = failure(lambda: manager.save(1, state))
        manager.save(2, plain(2.0))
    assert "this one cannot be written" in str(told)
    assert_complete(tmp_path / "step_2")
