"""Saves of an FSDP2 model: create, reuse, resume; what they cost and what stock ``dcp.load`` reads from them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dtensor_jobs import (
    FINALIZE,
    INLINE,
    SAVE,
    Counts,
    Seen,
    Trainer,
    assert_complete,
    differing,
    everything_in,
    loaded_on_rank,
    reusing,
    saved,
)
from queue_scenarios import gated
from ranks import RankPool
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron_ckpt_ext.commit.commit import How
from megatron_ckpt_ext.commit.failures import SaveFailedError
from megatron_ckpt_ext.compat.dtensor import by_spec
from megatron_ckpt_ext.strategy.fsdp_dtensor import FsdpDtensorSaver, StartedSave, save_fsdp_dtensor
from megatron_ckpt_ext.write.worker import Call, WorkerSettings
from megatron_ckpt_ext.write.writer import CallState, Writer

REUSED, REBUILT, TOGETHER = How.REUSED.value, How.REBUILT.value, How.TOGETHER.value

PLANNED_TOGETHER: Counts = {
    SAVE: {"gather_object": 1, "scatter_object_list": 1},
    FINALIZE: {"all_reduce": 1, "gather_object": 1, "broadcast_object_list": 1, "all_gather_object": 1},
}
"""One exchange of plans; the vote; results and sections; the answer; who sees the prepared file."""
FOLLOWED: Counts = {FINALIZE: {"all_reduce": 1}}


def life_on_rank(directory: str, seed: int, first: int, resumes: bool, hybrid: bool) -> list[Seen]:
    """A job with two saves, ``step_FIRST`` and the one behind it; with four ranks no other process writes."""
    file = f"{directory}/prepared.metadata"
    names = ("replicate", "shard")
    trainer = Trainer(seed, init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if hybrid else None)
    seen = []
    settings = {"prepared_metadata": reusing(file)} if resumes else {"ckpt_metadata_create_path": file}
    with FsdpDtensorSaver(**settings, mode=INLINE if dist.get_world_size() == 4 else None) as saver:
        for number in (first, first + 1):
            trainer.step()
            seen.append(saved(saver, f"{directory}/step_{number}", trainer.state()))
    return seen


@pytest.mark.parametrize(
    ("world_size", "hybrid"), [(2, False), (4, False), (4, True)], ids=["queue", "four_ranks", "hybrid"]
)
def test_create_reuse_and_resume(ranks: RankPool, tmp_path: Path, world_size: int, hybrid: bool) -> None:
    first = ranks.run(life_on_rank, str(tmp_path), 1, 1, False, hybrid, world_size=world_size)
    second = ranks.run(life_on_rank, str(tmp_path), 2, 3, True, hybrid, world_size=world_size)

    for rank in range(world_size):
        seen = [*first[rank], *second[rank]]
        assert [each.how for each in seen] == [TOGETHER, REUSED, REUSED, REUSED]
        assert [each.counts for each in seen] == [PLANNED_TOGETHER, FOLLOWED, FOLLOWED, FOLLOWED]
    directories = [tmp_path / f"step_{number}" for number in (1, 2, 3, 4)]
    for directory in directories:
        assert_complete(directory)
    expected = [each.values for each in (*first[0], *second[0])]
    for readers in (1, 2, 4):
        for found in ranks.run(loaded_on_rank, list(map(str, directories)), world_size=readers):
            assert [differing(*pair) for pair in zip(found, expected, strict=True)] == [[]] * 4


PLACEMENTS: dict[str, list[Placement]] = {
    "rows": [Replicate(), Shard(0)],
    "columns": [Shard(1), Replicate()],
    "both": [Shard(0), Shard(1)],
    "twice": [Shard(0), Shard(0)],
    "strided": [_StridedShard(0, split_factor=2), Shard(0)],
    "everywhere": [Replicate(), Replicate()],
}


def placed_on_rank(directory: str) -> list[Seen]:
    """Tensors of 7 x 3, and one of no elements, in every placement on a mesh of 2 x 2; saved twice."""
    mesh, seen = init_device_mesh("cpu", (2, 2)), []
    with FsdpDtensorSaver(mode=INLINE) as saver:
        for number in (1, 2):
            state = {name: placed(whole(number), mesh, placements) for name, placements in PLACEMENTS.items()}
            state["empty"] = placed(torch.empty(0, 3), mesh, PLACEMENTS["rows"])
            seen.append(saved(saver, f"{directory}/{number}", state, whole=False))
        written = {} if saver.prepared is None else saver.prepared.slice.locators
    return [*seen, *(item.fqn for item in written)]  # type: ignore[list-item]


def whole(seed: int) -> torch.Tensor:
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(seed))


def placed(value: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """What torch's rule makes of ``placements``, by hand: no collectives, so that the rule is what is tested."""
    like = DTensor.from_local(value, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
    sizes, offset = by_spec(like)
    part = value[tuple(slice(start, start + size) for start, size in zip(offset, sizes, strict=True))].clone()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


def test_every_placement_is_saved_once(ranks: RankPool, tmp_path: Path) -> None:
    by_rank = ranks.run(placed_on_rank, str(tmp_path), world_size=4)

    assert [[each.how for each in rank[:2]] for rank in by_rank] == [[TOGETHER, REUSED]] * 4
    written = Counter(name for rank in by_rank for name in rank[2:])
    assert written == {"rows": 2, "columns": 2, "both": 4, "twice": 4, "strided": 4, "everywhere": 1, "empty": 1}
    for number in (1, 2):
        expected = {**dict.fromkeys(PLACEMENTS, whole(number)), "empty": torch.empty(0, 3)}
        assert differing(everything_in(tmp_path / str(number)), expected) == []


class GatedWriter(Writer):
    """Writes nothing before ``gate`` exists."""

    gate: Path

    def submit(self, call: Call) -> CallState:
        return super().submit(replace(call, function=partial(gated, self.gate, call.function)))


def blocked_on_rank(directory: str) -> tuple[list[int], bool, bool]:
    """Save while nothing can be written; the gate opens when the save has returned on all ranks."""
    gate, target = Path(directory, "gate"), Path(directory, "step_1")
    writers: list[GatedWriter] = []

    def start(settings: WorkerSettings, timeout: timedelta) -> Writer:
        writers.append(GatedWriter(settings, timeout))
        writers[0].gate = Path(directory)  # open, so that the writer can show that it works
        return writers[0]

    with FsdpDtensorSaver(start_writer=start) as saver:
        writers[0].gate = gate
        started = save_fsdp_dtensor(Trainer(seed=1).state(), target, saver=saver)
        finalized = saver.finalize()
        was_published = (target / ".metadata").exists()
        dist.barrier()
        gate.touch()
        assert isinstance(started, StartedSave)
        started.wait()
        dist.barrier()
    return finalized, was_published, (target / ".metadata").exists()


def test_a_save_does_not_wait_for_its_writer(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(blocked_on_rank, str(tmp_path)) == [([], False, True)] * 2


def ended_on_rank(directory: str) -> tuple[int, bool, list[str]]:
    """A saver that never saves; then saves that are asked how they ended after somebody else finalized them."""
    before = set(active_children())
    FsdpDtensorSaver().close()
    left = len(set(active_children()) - before)
    errors, state = [], Trainer(seed=1).state()
    with FsdpDtensorSaver() as saver:
        good = saver.save(state, f"{directory}/good")
        saver.finalize(blocking=True)
        bad = saver.save(lambda: {**state, "late": lambda: "functions of a rank cannot be pickled"}, f"{directory}/bad")
        for attempt in (lambda: saver.finalize(blocking=True), bad.wait):
            try:
                attempt()
            except SaveFailedError as error:
                errors.append(str(error))
        is_same = good.wait() is good.wait()
    return left, is_same, errors


def test_a_saver_ends_its_writer_and_a_save_knows_how_it_ended(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(ended_on_rank, str(tmp_path))

    assert found[0] == found[1]
    left, is_same, (cause, again) = found[0]
    assert (left, is_same) == (0, True)
    assert "pickle" in cause
    assert "failed, as was raised before" in again


def test_a_process_without_a_group_saves_synchronously(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = save_fsdp_dtensor({"weight": torch.ones(3)}, tmp_path / "step_1").wait()

    assert saved.mode.is_fallback
    assert [record.message for record in caplog.records] == [
        "Checkpoints are saved synchronously, though asynchronous saves were asked for: torch.distributed is not "
        "initialised."
    ]
    assert_complete(tmp_path / "step_1")
