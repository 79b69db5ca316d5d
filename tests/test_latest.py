"""The newest complete checkpoint of a directory, and why newer ones were passed over."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from megatron_ckpt_ext import latest_complete_step
from megatron_ckpt_ext.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save(directory: Path, name: str) -> Path:
    """Save a checkpoint of plain torch."""
    state_dict_saver.save({"weight": torch.ones(3, 4)}, checkpoint_id=directory / name, no_dist=True)
    return directory / name


def test_the_newest_is_chosen_by_number(tmp_path: Path) -> None:
    for name in ("step_9", "step_10", "iter_0000002", "iter_0000007"):
        save(tmp_path, name)

    found = latest_complete_step(tmp_path)

    assert (found.step, found.path, found.skipped) == (10, str(tmp_path / "step_10"), ())


def test_steps_of_both_namings_and_any_length(tmp_path: Path) -> None:
    for name in ("step_0", "iter_0000009", "iter_12345678"):
        save(tmp_path, name)

    assert latest_complete_step(tmp_path).step == 12345678
    shutil.rmtree(tmp_path / "iter_12345678")
    assert latest_complete_step(str(tmp_path)).step == 9
    shutil.rmtree(tmp_path / "iter_0000009")
    assert latest_complete_step(tmp_path).step == 0


def test_incomplete_ones_are_skipped_newest_first_with_the_reason(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, f"iter_{step:07}")
    (tmp_path / "iter_0000002" / ".metadata").unlink()  # older than the one that is found
    (tmp_path / "iter_0000004" / "__0_0.distcp").unlink()
    (tmp_path / "iter_0000005" / ".metadata").unlink()

    found = latest_complete_step(tmp_path)

    assert (found.step, found.path) == (3, str(tmp_path / "iter_0000003"))
    assert [Path(report.path).name for report in found.skipped] == ["iter_0000005", "iter_0000004"]
    assert found.skipped[0].reason == ".metadata is missing: no save was finished in this directory"
    assert found.skipped[1].reason.startswith("file '__0_0.distcp', in which 1 items lie, cannot be read: No such file")


@pytest.mark.parametrize(
    "name",
    [
        *("iter_abc", "iter_", "iter_7", "iter_000007", "iter_00000007", "iter_-000007", "iter_0000007.tmp", "release"),
        *("step_", "step_5.tmp", "step_05", "step_-5", "step_5\n", "xstep_5", "Step_5", "step_\u0665"),
        f"step_{'9' * 200}",
    ],
)
def test_what_is_not_ours_is_ignored(tmp_path: Path, name: str) -> None:
    save(tmp_path, "step_1").rename(tmp_path / name)

    found = latest_complete_step(tmp_path)

    assert (found.step, found.path, found.skipped) == (None, None, ())


def test_files_and_links_to_nothing_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "step_5").write_bytes(b"")
    (tmp_path / "step_6").symlink_to("nowhere")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")

    assert latest_complete_step(tmp_path).skipped == ()


def test_a_link_to_a_checkpoint_is_one(tmp_path: Path) -> None:
    """As users make them to start a job from another job's checkpoint."""
    save(tmp_path, "other/step_8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "step_8").symlink_to(tmp_path / "other" / "step_8")

    assert latest_complete_step(tmp_path / "mine").step == 8


def test_no_step_is_complete(tmp_path: Path) -> None:
    assert latest_complete_step(tmp_path).step is None

    (tmp_path / "step_3").mkdir()
    found = latest_complete_step(tmp_path)

    assert (found.step, found.path) == (None, None)
    assert [report.path for report in found.skipped] == [str(tmp_path / "step_3")]


def test_the_directory_is_read_anew_each_time(tmp_path: Path) -> None:
    save(tmp_path, "step_1")
    assert latest_complete_step(tmp_path).step == 1
    save(tmp_path, "step_2")
    assert latest_complete_step(tmp_path).step == 2
    os.truncate(tmp_path / "step_2" / "__0_0.distcp", 10)
    assert latest_complete_step(tmp_path).step == 1


@pytest.mark.parametrize(("name", "why"), [("missing", "No such file or directory"), ("file", "Not a directory")])
def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(
        ConfigurationError, match=rf"the checkpoint directory '.*{name}' cannot be listed: {why}\. Name"
    ):
        latest_complete_step(tmp_path / name)


def test_with_a_subdirectory_each_step_is_judged_by_it(tmp_path: Path) -> None:
    for name in ("step_1/trainer", "step_2/trainer", "step_3/loader", "step_4", "iter_0000009", "iter_0000009/trainer"):
        save(tmp_path, name)
    (tmp_path / "step_2" / "trainer" / "__0_0.distcp").unlink()

    found = latest_complete_step(tmp_path, subdirectory="trainer")

    assert (found.step, found.path) == (1, str(tmp_path / "step_1" / "trainer"))
    assert [Path(report.path).relative_to(tmp_path).parts for report in found.skipped] == [
        ("step_4", "trainer"),
        ("step_3", "trainer"),
        ("step_2", "trainer"),
    ]
    assert found.skipped[0].reason == f"'{tmp_path}/step_4/trainer' is no directory"


def test_with_an_empty_subdirectory_only_step_n_counts(tmp_path: Path) -> None:
    for name in ("step_1", "iter_0000009"):
        save(tmp_path, name)

    found = latest_complete_step(tmp_path, subdirectory="")

    assert (found.step, found.path, found.skipped) == (1, str(tmp_path / "step_1"), ())


def test_a_subdirectory_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not the name of one directory inside step_N"):
        latest_complete_step(tmp_path, subdirectory="../step_1")
