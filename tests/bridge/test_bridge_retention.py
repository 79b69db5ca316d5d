"""Bridge's ``most_recent_k`` where saves are ours, beside what Bridge leaves."""

import threading
from pathlib import Path

import pytest

pytest.importorskip("megatron.bridge", reason="make bridge installs it")

from megatron.bridge.training.checkpointing import cleanup_old_non_persistent_checkpoint

from megatron_ckpt_ext.compat.bridge import DATALOADER_STATES
from megatron_ckpt_ext.integrations.bridge.retention import keeping_complete

PUBLISHED, IN_FLIGHT = True, False
CASES: dict[str, tuple[dict[int, bool], int, set[int], set[int]]] = {
    "the second is in flight": ({2: PUBLISHED, 4: IN_FLIGHT}, 1, {4}, {2, 4}),
    "none is to be kept": ({2: PUBLISHED, 4: PUBLISHED}, 0, set(), {4}),
    "none is to be kept and one is in flight": ({2: PUBLISHED, 4: IN_FLIGHT}, 0, set(), {2, 4}),
    "two are kept": ({2: PUBLISHED, 4: PUBLISHED, 6: PUBLISHED}, 2, {4, 6}, {4, 6}),
    "two are kept and one is in flight": ({2: PUBLISHED, 4: PUBLISHED, 6: IN_FLIGHT}, 2, {4, 6}, {2, 4, 6}),
    "an old one was cut off": ({2: IN_FLIGHT, 4: PUBLISHED, 6: PUBLISHED}, 1, {6}, {6}),
}
"""Step -> whether it is published; ``most_recent_k``; what Bridge leaves, and what ours does."""


def make(folder: Path, step: int, published: bool) -> None:
    (folder / f"iter_{step:07d}").mkdir(parents=True)
    if published:
        (folder / f"iter_{step:07d}" / ".metadata").touch()


def left(folder: Path) -> set[int]:
    return {int(path.name[5:]) for path in folder.glob("iter_*")}


@pytest.mark.parametrize(("steps", "leave", "bridges", "ours"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("is_ours", [False, True])
def test_the_newest_complete_checkpoint_stays(
    steps: dict[int, bool], leave: int, bridges: set[int], ours: set[int], is_ours: bool, tmp_path: Path
) -> None:
    for step, published in steps.items():
        make(tmp_path, step, published)

    keeping_complete(cleanup_old_non_persistent_checkpoint, lambda: is_ours)(tmp_path, leave)

    assert left(tmp_path) == (ours if is_ours else bridges)


def test_the_state_of_the_data_loader_goes_with_its_step(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make(tmp_path, step, PUBLISHED)
        (tmp_path / DATALOADER_STATES / f"iter_{step:07d}").mkdir(parents=True)

    keeping_complete(cleanup_old_non_persistent_checkpoint, lambda: True)(tmp_path, 2, do_async=True)
    for thread in threading.enumerate():
        if thread.name == "checkpoint clean-up":
            thread.join(30)

    assert left(tmp_path) == left(tmp_path / DATALOADER_STATES) == {4, 6}
