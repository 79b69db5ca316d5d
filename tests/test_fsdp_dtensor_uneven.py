"""Shards of any size, as Megatron-FSDP cuts them, on meshes of all kinds; ranks without a shard may lack its key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dtensor_jobs import (
    FINALIZE,
    INLINE,
    SAVE,
    Counts,
    Seen,
    StateDict,
    assert_complete,
    differing,
    everything_in,
    reusing,
    saved,
)
from ranks import RankPool
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from megatron_ckpt_ext.commit.commit import How
from megatron_ckpt_ext.commit.failures import WriteFailedError
from megatron_ckpt_ext.compat.dcp import DistWrapper
from megatron_ckpt_ext.plan.dtensor_exchange import ExchangeError
from megatron_ckpt_ext.plan.dtensor_uneven import place_uneven_shards
from megatron_ckpt_ext.strategy.fsdp_dtensor import FsdpDtensorSaver

REUSED, REBUILT, TOGETHER = How.REUSED.value, How.REBUILT.value, How.TOGETHER.value
REBUILT_COUNTS: Counts = {
    FINALIZE: {"all_reduce": 1, "gather_object": 2, "scatter_object_list": 1, "broadcast_object_list": 1}
}
"""The vote; where shards lie now; results and sections; the answer."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A tensor of 7 x 4 and where each rank's part of it lies: rows and columns."""

    mesh: tuple[int, ...]
    placements: Sequence[Any]
    parts: Sequence[tuple[slice, slice]]
    order: Sequence[int] | None = None

    def device_mesh(self) -> DeviceMesh:
        """Called on all ranks: makes groups."""
        mesh = init_device_mesh("cpu", self.mesh)
        if self.order is not None:
            mesh._shard_order = list(self.order)  # type: ignore[attr-defined]  # as Megatron-FSDP does it
        return mesh

    def dtensor(self, whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        local = whole[self.parts[dist.get_rank()]].clone()
        return DTensor.from_local(
            local, mesh, self.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def is_empty(self) -> bool:
        rows, _ = self.parts[dist.get_rank()]
        return bool(rows.start == rows.stop)


def rows(*sizes: int, columns: slice = slice(0, 4)) -> list[tuple[slice, slice]]:
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [(slice(end - size, end), columns) for size, end in zip(sizes, ends, strict=True)]


LEFT, RIGHT = slice(0, 1), slice(1, 4)
CUTS = {
    # Empty and full at one offset; first, so that torch's planner would choose the lowest rank, which is empty.
    "empty_first": Cut(mesh=(4,), placements=[Shard(0)], parts=rows(0, 7, 0, 0)),
    "rows": Cut(mesh=(4,), placements=[Shard(0)], parts=rows(3, 2, 2, 0)),
    "hybrid": Cut(mesh=(2, 2), placements=[Replicate(), Shard(0)], parts=rows(5, 2) * 2),
    "hybrid_empty": Cut(mesh=(2, 2), placements=[Replicate(), Shard(0)], parts=rows(7, 0) * 2),
    "outer_sharded": Cut(  # the inner mesh dimension is cut first
        mesh=(2, 2),
        placements=[Shard(0), Shard(0)],
        parts=[
            (slice(0, 1), slice(0, 4)),
            (slice(4, 6), slice(0, 4)),
            (slice(1, 4), slice(0, 4)),
            (slice(6, 7), slice(0, 4)),
        ],
        order=[1, 0],
    ),
    "tensor_parallel": Cut(
        mesh=(2, 2),
        placements=[Shard(0), Shard(1)],
        parts=[(slice(0, 5), LEFT), (slice(0, 5), RIGHT), (slice(5, 7), LEFT), (slice(5, 7), RIGHT)],
        order=[1, 0],
    ),
    "strided": Cut(
        mesh=(2, 2),
        placements=[_StridedShard(0, split_factor=2), Shard(0)],
        parts=[
            (slice(0, 1), slice(0, 4)),
            (slice(4, 6), slice(0, 4)),
            (slice(1, 4), slice(0, 4)),
            (slice(6, 7), slice(0, 4)),
        ],
    ),
    "replicated": Cut(mesh=(4,), placements=[Replicate()], parts=[(slice(0, 7), slice(0, 4))] * 4),
}
MOVED = {**CUTS, "rows": Cut(mesh=(4,), placements=[Shard(0)], parts=rows(2, 2, 3, 0))}
"""Rank 1 has as much as before, and elsewhere."""


def wholes(seed: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"{kind}.{name}": torch.randn(7, 4, generator=generator) for kind in ("model", "exp_avg") for name in names}


type Meshes = Mapping[str, DeviceMesh]


def state_of(whole: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut], meshes: Meshes) -> StateDict:
    """Every rank has the model's tensors; an optimizer leaves out those of which it has nothing."""
    state: StateDict = {}
    for key, value in whole.items():
        kind, name = key.split(".")
        if kind == "model" or not cuts[name].is_empty():
            state[key] = cuts[name].dtensor(value, meshes[name])
    return {**state, "step": torch.tensor(3.0)}


@dataclass(frozen=True, kw_only=True)
class Life:
    """What one rank saw of several saves, and how many keys it had."""

    seen: list[Seen]
    keys: int


def life_on_rank(directory: str) -> Life:
    """Create and reuse, resume, move a boundary between ranks, and reuse that."""
    meshes = {name: cut.device_mesh() for name, cut in CUTS.items()}
    seen, file = [], f"{directory}/prepared.metadata"

    def save(saver: FsdpDtensorSaver, number: int, cuts: Mapping[str, Cut]) -> StateDict:
        state = state_of(wholes(number, list(cuts)), cuts, meshes)
        seen.append(saved(saver, f"{directory}/{number}", state, whole=False))
        return state

    with FsdpDtensorSaver(ckpt_metadata_create_path=file, uneven=True, mode=INLINE) as saver:
        save(saver, 1, CUTS)
        save(saver, 2, CUTS)
    with FsdpDtensorSaver(prepared_metadata=reusing(file), uneven=True, mode=INLINE) as saver:
        keys = len(save(saver, 3, CUTS))
        save(saver, 4, MOVED)
        save(saver, 5, MOVED)
    return Life(seen=seen, keys=keys)


def test_uneven_shards_are_placed_by_one_exchange_and_found_in_the_slice_afterwards(
    ranks: RankPool, tmp_path: Path
) -> None:
    lives = ranks.run(life_on_rank, str(tmp_path), world_size=4)

    assert [life.keys for life in lives] == [16, 16, 16, 14]
    for life in lives:
        assert [each.how for each in life.seen] == [TOGETHER, REUSED, REUSED, REBUILT, REUSED]
        assert life.seen[0].counts[SAVE] == {"gather_object": 1, "scatter_object_list": 1}
        for number in (1, 2, 4):
            assert life.seen[number].counts == {FINALIZE: {"all_reduce": 1}}
        rebuilt = life.seen[3].counts[FINALIZE]
        assert {**rebuilt, "all_gather_object": 0} == {**REBUILT_COUNTS[FINALIZE], "all_gather_object": 0}
        assert "model.rows" in str(life.seen[3].reason) or "exp_avg.rows" in str(life.seen[3].reason)
    for number in range(1, 6):
        assert_complete(tmp_path / str(number))
        found = everything_in(tmp_path / str(number))
        assert differing(found, {**wholes(number, list(CUTS)), "step": torch.tensor(3.0)}) == []
    assert ranks.run(loaded_on_rank, str(tmp_path), 5, world_size=4) == [[]] * 4


def swapped_on_rank(directory: str) -> list[tuple[str, str | None]]:
    """The mesh dimensions change places; every rank has a shard of the same shape as before, and two another one."""
    mesh, seen = init_device_mesh("cpu", (2, 2)), []
    with FsdpDtensorSaver(uneven=True, mode=INLINE) as saver:
        for number, placements in enumerate(([Replicate(), Shard(0)], [Shard(0), Replicate()])):
            at = (mesh.get_coordinate() or [0, 0])[1 - number]
            local = EIGHT[4 * at : 4 * at + 4].clone()
            value = DTensor.from_local(local, mesh, placements, run_check=False, shape=EIGHT.shape, stride=(4, 1))
            seen.append(saved(saver, f"{directory}/{number}", {"weight": value}, whole=False))
    return [(each.how, each.reason) for each in seen]


EIGHT = torch.arange(32.0).view(8, 4)


def test_an_offset_is_not_taken_from_the_slice_where_the_tensor_lies_otherwise(ranks: RankPool, tmp_path: Path) -> None:
    for (first, _), (second, reason) in ranks.run(swapped_on_rank, str(tmp_path), world_size=4):
        assert (first, second) == (TOGETHER, REBUILT)
        assert str(reason).startswith("rank 0: weight at offset [0, 0] does not match the prepared metadata: prepared ")
        assert ", R,S0 at 0x0 of 2x2 ranks " in str(reason)
        assert ", S0,R at 0x0 of 2x2 ranks " in str(reason)
    for number in (0, 1):
        assert differing(everything_in(tmp_path / str(number)), {"weight": EIGHT}) == []


def loaded_on_rank(directory: str, number: int) -> list[str]:
    """Load with stock ``dcp.load`` into shards cut in another way; return the keys that have other values."""
    meshes = {name: cut.device_mesh() for name, cut in CUTS.items()}
    right = wholes(number, list(CUTS))
    state = state_of({key: torch.zeros_like(value) for key, value in right.items()}, CUTS, meshes)
    place_uneven_shards(state, DistWrapper(None, True, 0))
    dcp.load(state, checkpoint_id=f"{directory}/{number}")  # type: ignore[attr-defined]  # public, not re-exported
    expected = state_of(right, CUTS, meshes)
    return [key for key in right if key in state and not torch.equal(state[key].to_local(), expected[key].to_local())]


def disagreeing_on_rank(directory: str) -> list[str]:
    """A rank lacks what it has a part of; shards have not the size of the rule; optimizer state is one rank's alone."""
    errors, whole = [], wholes(1, ["rows"])
    meshes = {"rows": CUTS["rows"].device_mesh()}
    right, lost, plain = (state_of(whole, CUTS, meshes) for _ in range(3))
    if dist.get_rank() == 2:
        del lost["exp_avg.rows"]
    plain["optimizer.state.rows.exp_avg"] = torch.zeros(2, 4)
    for name, state, uneven in (("lost", lost, True), ("ruled", right, False), ("plain", plain, True)):
        with FsdpDtensorSaver(uneven=uneven, mode=INLINE) as saver:
            try:
                saver.request(state, f"{directory}/{name}")
            except WriteFailedError as error:
                errors.append(str(error))
    return errors


def test_what_does_not_fit_together_is_an_error_with_its_key_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    first, *others = ranks.run(disagreeing_on_rank, str(tmp_path), world_size=4)

    assert others == [first] * 3
    lost, ruled, plain = first
    assert "the shards of exp_avg.rows have 5 of 7 elements in dimension 0, on the ranks 0, 1" in lost
    assert "rank 0: planning failed: ConfigurationError: model.rows has [3, 4] of [7, 4] on this rank" in ruled
    assert "pass uneven=True" in ruled
    assert "optimizer.state.rows.exp_avg is a plain tensor of shape [2, 4], and model.rows is a DTensor" in plain
    assert not any(path.suffix == ".distcp" for path in tmp_path.rglob("*"))


def placed_on_rank() -> str:
    """Rank 1 alone has a state dict that cannot be flattened: two of its leaves have one key."""
    state: StateDict = {
        "rows": Cut(mesh=(2,), placements=[Shard(0)], parts=rows(5, 2)).dtensor(
            torch.ones(7, 4), init_device_mesh("cpu", (2,))
        )
    }
    if dist.get_rank() == 1:
        state |= {"nested": {"rows": 1}, "nested.rows": 2}
    try:
        place_uneven_shards(state, DistWrapper(None, True, 0))
    except ExchangeError as error:
        return str(error)
    return ""


def test_a_state_dict_that_one_rank_cannot_flatten_is_an_error_of_all(ranks: RankPool) -> None:
    first, second = ranks.run(placed_on_rank, timeout=20)

    assert first == second
    assert first.startswith("rank 1: planning failed: ValueError: ")
