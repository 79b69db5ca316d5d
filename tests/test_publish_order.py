"""What becomes visible of a save, and when: nothing before all ranks have written, the tracker last."""

import os
from pathlib import Path

import pytest
from scenes import Scenes

from megatron_ckpt_ext.publish.clean import clear_for_save

pytest_plugins = ["guarantee_jobs"]

LEFT = [".metadata", "__0_0.distcp", "__1_0.distcp", "metadata.json"]


def test_nothing_is_visible_while_a_writer_stands_still(scenes: Scenes) -> None:
    """And the tracker names the save that was finalized, not the one that was scheduled last."""
    assert scenes.alike("blocked_writer") == [("", [False, False]), ("1", [True, False]), ("2", [True, True])]


def test_a_failed_save_does_not_move_the_tracker(scenes: Scenes) -> None:
    (first, tracker), (failed, tracker_behind), _ = scenes.alike("failed_save_and_tracker")

    assert first == "no error"
    assert "writing failed" in failed
    assert (tracker, tracker_behind) == ("1", "1")


def test_a_finalizer_that_fails_before_the_tracker_leaves_it_untouched(scenes: Scenes) -> None:
    error, tracker = scenes.alike("failed_save_and_tracker")[2]

    assert "rank 0: publishing failed: LookupError: no such thing" in error
    assert tracker == "1"


def test_the_old_marker_is_gone_for_good_before_the_first_data_file_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    unlink, fsync = os.unlink, os.fsync

    def noted_unlink(path: str, **options: int) -> None:
        calls.append(("unlink", os.path.basename(path)))
        unlink(path, **options)

    def noted_fsync(descriptor: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / name).write_text("old")
    monkeypatch.setattr(os, "unlink", noted_unlink)
    monkeypatch.setattr(os, "fsync", noted_fsync)

    clear_for_save(str(tmp_path), rank=0, world_size=1, is_coordinator=True)

    marker, data = calls.index(("unlink", ".metadata")), calls.index(("unlink", "__0_0.distcp"))
    assert ("fsync", str(tmp_path)) in calls[marker:data]


def test_a_save_over_a_crashed_attempt_leaves_only_what_its_metadata_names(scenes: Scenes) -> None:
    assert scenes.alike("over_a_crashed_attempt") == LEFT


def test_a_save_over_a_crashed_attempt_of_torchs_own_leaves_nothing_of_it(scenes: Scenes) -> None:
    assert scenes.alike("over_a_crashed_attempt_of_torchs") == LEFT
