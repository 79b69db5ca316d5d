"""Megatron's own clean-up of non-persistent checkpoints, where one is being written."""

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

    leaving_complete(cleanup_old_non_persistent_checkpoint, lambda: is_ours)(tmp_path)

    assert {int(path.name[5:]) for path in tmp_path.iterdir()} == (ours if is_ours else stock)
