"""One job of Megatron's own loop, watched: its processes before the first step, its forks, and what is visible when."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from audited_training import BLOCKED_STEP, RELEASED_STEP

ROOT = Path(__file__).resolve().parents[1]
STEPS = 6


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Any]]:
    """What a job on one rank noted that saves every second step and blocks the writer of the first save."""
    folder = tmp_path_factory.mktemp("job")
    save, file = str(folder / "checkpoints"), folder / "notes"
    command = [
        *(sys.executable, "-m", "megatron_ckpt_ext.cli.main", "run", "--cpu", "--nproc", "1"),
        *("--recipe", str(ROOT / "recipes" / "cpu_laptop.yaml"), str(ROOT / "tests" / "audited_training.py")),
        *("--train-iters", str(STEPS), "--save-interval", "2", "--save", save, "--ckpt-metadata-create"),
        *("--ckpt-metadata", str(folder / "prepared.metadata"), "--eval-iters", "0"),
    ]
    environment = os.environ | {
        "OUTPUT": str(folder),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'functional_tests'}",
        "AUDIT_FILE": str(file),
        "AUDIT_SCRIPT": str(ROOT / "recipes" / "pretrain_gpt.py"),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert Path(save, "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]


def seen(notes: list[tuple[str, Any]]) -> dict[int, dict[str, Any]]:
    """Step -> what was visible before it."""
    return {content["step"]: content for kind, content in notes if kind == "seen"}


def test_the_writer_runs_before_the_first_step_and_stays(notes: list[tuple[str, Any]]) -> None:
    before_each_step = [each["spawned"] for _, each in sorted(seen(notes).items())]

    assert len(before_each_step) == STEPS
    assert len(before_each_step[0]) == 1
    assert before_each_step == [before_each_step[0]] * STEPS


def test_nothing_of_a_save_is_visible_before_it_is_written(notes: list[tuple[str, Any]]) -> None:
    for step in range(BLOCKED_STEP + 1, RELEASED_STEP + 1):
        assert (seen(notes)[step]["tracker"], seen(notes)[step]["published"]) == ("", [])


def test_the_tracker_names_the_step_of_the_save_and_not_of_the_poll(notes: list[tuple[str, Any]]) -> None:
    last = seen(notes)[STEPS]

    assert last["tracker"] == str(BLOCKED_STEP)
    assert f"iter_{BLOCKED_STEP:07d}" in last["published"]


def test_the_package_and_the_writer_fork_nothing(notes: list[tuple[str, Any]]) -> None:
    askers = [content for kind, content in notes if kind == "fork"]

    assert [asker for asker in askers if "megatron_ckpt_ext" in asker or asker == "the writer"] == []


def test_nobody_forks_in_a_job_with_our_queue(notes: list[tuple[str, Any]]) -> None:
    assert [content for kind, content in notes if kind == "fork"] == []
