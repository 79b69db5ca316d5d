"""Slots: an item of moving length moves nothing behind it, and every stock reader reads it."""

import io
import random
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from ranks import RankPool
from workload import Job, StateDict, checkpoint_values, same, save, values

from megatron_ckpt_ext.commit.commit import Committed, How
from megatron_ckpt_ext.metadata.slots import HEAD_ROOM_BYTES, HEAD_ROOM_LIMIT, padded, slot_size
from megatron_ckpt_ext.plan import async_plan

STEPS = (1, 255, 256, 65535, 65536, 2**31)
CONTENT = st.recursive(
    st.none() | st.integers(-(2**63), 2**63) | st.text(max_size=200) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def archive(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


@settings(max_examples=150, deadline=None)
@given(content=CONTENT, more=st.integers(0, 400) | st.integers(400, 100_000))
def test_a_padded_archive_loads_to_the_same(content: Any, more: int) -> None:
    bare = archive([content, torch.arange(3)])
    slot = len(bare) + more

    filled = padded(bare, slot)

    assert filled is not None
    assert len(filled) == slot
    for weights_only in (True, False):
        loaded = torch.load(io.BytesIO(filled), weights_only=weights_only)
        assert loaded[0] == content
        assert torch.equal(loaded[1], torch.arange(3))
    assert zipfile.ZipFile(io.BytesIO(filled)).testzip() is None


@pytest.mark.parametrize("more", [0, 1, 64, 100, 199, 200, 1024, 5000, 70_000, HEAD_ROOM_LIMIT])
def test_a_padded_archive_can_be_mapped(more: int) -> None:
    content = {"weight": torch.randn(40_000)}
    bare = archive(content)
    with tempfile.NamedTemporaryFile() as file:
        file.write(padded(bare, len(bare) + more) or b"")
        file.flush()
        assert torch.equal(torch.load(file.name, mmap=True)["weight"], content["weight"])


def test_what_does_not_fit_or_is_no_archive_is_left_alone() -> None:
    bare = archive("text")
    assert padded(bare, len(bare) - 1) is None
    assert padded(b"bytes that torch.save did not write", 100) is None
    assert padded(b"", 100) is None
    assert padded(bare + b"trailing", len(bare) + 100) is None


def test_an_archive_that_needs_zip64_records_is_left_alone() -> None:
    bare = archive("text")
    for field in (-10, -6):  # size of the central directory, and its offset, in the end record
        large = bare[:field] + b"\xff" * 4 + bare[field + 4 :]
        assert padded(large, len(large) + 5000) is None


@given(length=st.integers(0, 2**33))
def test_head_room_has_a_floor_a_share_and_a_limit(length: int) -> None:
    room = slot_size(length) - length
    assert room == min(max(HEAD_ROOM_BYTES, length // 4), HEAD_ROOM_LIMIT)


def moving_items(step: int, moved: random.Random) -> StateDict:
    """The items whose length moves in real jobs, in front of a tensor that must stay in its place."""
    groups = [{"lr": 1e-3, "step": step, "betas": (0.9, 0.999), "name": f"group {n}"} for n in range(64)]
    rng = {"python": moved.getstate(), "numpy": np.random.RandomState(step % 2**32).get_state()}
    extra = bytes(moved.getrandbits(8) for _ in range(200))
    return {
        "groups": ShardedObject("optimizer.param_groups", groups, (1,), (0,)),
        "rng": ShardedObject("rng_state", rng, (1,), (0,)),
        "extra": ShardedObject("layer._extra_state", {"recipe": extra, "scale": moved.random()}, (1,), (0,)),
        "weight": ShardedTensor.from_rank_offsets("weight", torch.full((8,), float(step % 1000))),
    }


def series_on_rank(directory: str, steps: list[int], pad: bool) -> tuple[list[str], int, list[str]]:
    """Save one checkpoint a step with one strategy; return how each went, how often a bare length moved, and errors."""
    outcomes: list[Committed] = []
    moved = random.Random(7)
    job = Job(directory=directory, create=f"{directory}/prepared", extra={"on_commit": outcomes.append})
    strategy, wrong, lengths = job.strategy(), [], []
    with pytest.MonkeyPatch.context() as patch:
        if not pad:
            patch.setattr(async_plan, "pad_non_tensor_items", lambda *_: {})
        for number, step in enumerate(steps):
            state = moving_items(step, moved)
            lengths.append([len(archive([state[name].data])) for name in ("groups", "rng", "extra")])
            kept = values(state)
            save(strategy, f"{directory}/{number}", state)
            found = checkpoint_values(f"{directory}/{number}")
            wrong += [name for name, value in kept.items() if not same_deeply(found[name], value)]
            for data in Path(f"{directory}/{number}").glob("*.distcp"):
                data.unlink()
    changes = sum(left != right for left, right in zip(lengths, lengths[1:], strict=False))
    return [committed.how for committed in outcomes], changes, wrong


def same_deeply(left: Any, right: Any) -> bool:
    return same(left, right) if isinstance(left, torch.Tensor) else str(left) == str(right)


@pytest.mark.parametrize("pad", [True, False], ids=["slots", "control_without_slots"])
def test_optimizer_steps_move_nothing(ranks: RankPool, tmp_path: Path, pad: bool) -> None:
    ((how, changes, wrong),) = ranks.run(series_on_rank, str(tmp_path), list(STEPS), pad, world_size=1)

    assert changes >= 2
    assert wrong == []
    assert how[0] == How.TOGETHER
    assert (set(how[1:]) == {How.REUSED}) is pad
    assert (How.REBUILT in how) is not pad


def test_a_moving_random_state_moves_nothing_in_300_saves(ranks: RankPool, tmp_path: Path) -> None:
    ((how, changes, wrong),) = ranks.run(
        series_on_rank, str(tmp_path), list(range(1, 301)), True, world_size=1, timeout=100
    )

    assert how == [How.TOGETHER] + [How.REUSED] * 299
    assert changes > 20
    assert wrong == []
