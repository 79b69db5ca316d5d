"""What a job of Megatron-FSDP without NVRx removes: what Megatron removes in its synchronous mode, and nothing else."""

import re
from pathlib import Path
from typing import Any

import pytest
from jobs import RECIPE, run_job
from megatron_fsdp_jobs import run_fsdp_job
from nvrx_stand_ins import WITHOUT_NVRX

OPTIONS = (
    *("--train-iters", "12", "--save-interval", "4", "--save-retain-interval", "8", "--log-progress"),
    *("--non-persistent-save-interval", "2", "--non-persistent-ckpt-type", "global"),
)
"""Saves at 4, 8 and 12, of which 4 goes; not persistent at 2, 6 and 10, of which 2 goes."""
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_same_checkpoints_are_left_as_by_stock_synchronous_saves(tmp_path: Path) -> None:
    for name in ("stock", "ours"):
        (tmp_path / name).mkdir()
    # stock Megatron cannot save fsdp_dtensor on these ranks: what it removes does not depend on the format
    run_job("job", OPTIONS, output=tmp_path / "stock", recipe=synchronous_recipe(tmp_path), stock=True)
    options: dict[str, Any] = {"kind": "late_clean_up", "sitecustomize": WITHOUT_NVRX}
    run_fsdp_job("job", OPTIONS, output=tmp_path / "ours", **options)

    left, expected = (tmp_path / name / "checkpoints" for name in ("ours", "stock"))
    steps = {"iter_0000008", "iter_0000012", "non_persistent/iter_0000006", "non_persistent/iter_0000010"}
    assert directories(left) == directories(expected) == steps | {"non_persistent"}
    trackers = [(folder / TRACKER).read_text() for folder in (left, left / "non_persistent")]
    assert trackers == [(folder / TRACKER).read_text() for folder in (expected, expected / "non_persistent")]
    assert trackers == ["12", "10"]
    assert progress(left) == progress(expected)
    assert "Deleted checkpoint\tIteration: 4" in progress(left)
    files = {f"{step}/{name}" for step in steps for name in (".metadata", "__0_0.distcp", "__1_0.distcp")}
    loose = {TRACKER, f"non_persistent/{TRACKER}", "progress.txt"}
    assert {str(path.relative_to(left)) for path in left.rglob("*") if path.is_file()} == files | loose


def synchronous_recipe(folder: Path) -> Path:
    """Copy the recipe of a laptop without the flags of asynchronous saves."""
    copy = folder / "synchronous.yaml"
    lines = RECIPE.read_text().splitlines(keepends=True)
    copy.write_text("".join(line for line in lines if "async-" not in line and "persistent-ckpt" not in line))
    return copy


def directories(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir()}


def progress(folder: Path) -> list[str]:
    return sorted(re.findall(r"(?:Saved|Deleted)[^\t\n]*\tIteration: \d+", (folder / "progress.txt").read_text()))
