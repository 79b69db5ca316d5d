"""Megatron's own clean-up of non-persistent checkpoints, where one is being written."""

import threading
from pathlib import Path

import pytest
from megatron.training.checkpointing import cleanup_old_non_persistent_checkpoint

from megatron_ckpt_ext.integrations.non_persistent import leaving_complete

CASES: dict[str, tuple[dict[int, bool], set[int], set[int]]] = {
    "nothing": ({}, set(), set()),
    "the first is being written": ({2: False}, {2}, {2}),
    "the second is being written": ({2: True, 6: False}, {6}, {2, 6}),
    "all are published": ({2: True, 6: True, 10: True}, {10}, {10}),
    "the third is being written": ({2: True, 6: True, 10: False}, {10}, {6, 10}),
    "two are being written": ({2: True, 6: False, 10: False}, {10}, {2, 6, 10}),
    "an old one was cut off": ({2: False, 6: True, 10: False}, {10}, {6, 10}),
}
"""Step -> whether it is published; what stock leaves, and what ours does."""


@pytest.mark.parametrize(("published", "stock", "ours"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("is_ours", [False, True])
def test_the_newest_published_checkpoint_stays(
    published: dict[int, bool], stock: set[int], ours: set[int], is_ours: bool, tmp_path: Path
) -> None:
    for step, has_metadata in published.items():
        folder = tmp_path / f"iter_{step:07d}"
        folder.mkdir()
        if has_metadata:
            (folder / ".metadata").touch()

    leaving_complete(cleanup_old_non_persistent_checkpoint, lambda: is_ours)(tmp_path, leave_ckpt_num=1)

    assert {int(path.name[5:]) for path in tmp_path.iterdir()} == (ours if is_ours else stock)


def test_it_runs_beside_the_training_and_touches_nothing_foreign(tmp_path: Path) -> None:
    for name in ("iter_0000002", "iter_0000006", "iter_best", "other/iter_0000001"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / ".metadata").touch()

    leaving_complete(cleanup_old_non_persistent_checkpoint, lambda: True)(tmp_path, leave_ckpt_num=1, do_async=True)
    for thread in threading.enumerate():
        if thread.name == "non-persistent clean-up":
            thread.join(30)

    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000006", "iter_best", "other"}
    assert (tmp_path / "other" / "iter_0000001").is_dir()


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 6):
        (tmp_path / f"iter_{step:07d}").mkdir()
        (tmp_path / f"iter_{step:07d}" / ".metadata").touch()
    (tmp_path / "iter_0000004").touch()  # a file, which no tree is

    leaving_complete(cleanup_old_non_persistent_checkpoint, lambda: True)(tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000004", "iter_0000006"}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
