"""Staging of DTensors: by their shard, and around it again; on one rank, and on two where one has nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankPool
from staged_states import KINDS, State, differences, reference, spoil, stage_twice
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.staging.errors import StagingError
from megatron_ckpt_ext.staging.stage import HostStager


@pytest.fixture
def stager() -> Iterator[HostStager]:
    stager = HostStager()
    yield stager
    stager.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A job of one rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, not re-exported
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, placements: list[Placement], *shape: int) -> DTensor:
    local = torch.randn(shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=local.shape, stride=local.stride())


DTENSORS: dict[str, tuple[list[Placement], tuple[int, ...]]] = {
    "shard": ([Replicate(), Shard(0)], (4, 3)),
    "inner_shard": ([Shard(1), Shard(0)], (4, 3)),
    "replicate": ([Replicate(), Replicate()], (4, 3)),
    "strided": ([_StridedShard(0, split_factor=2), Shard(0)], (4, 3)),
    "empty": ([Replicate(), Shard(0)], (0, 3)),
    "zero_dim": ([Replicate(), Replicate()], ()),
}


@pytest.mark.parametrize(("placements", "shape"), DTENSORS.values(), ids=DTENSORS)
@pytest.mark.usefixtures("alone")
def test_dtensors_are_copied_by_their_shard(
    placements: list[Placement], shape: tuple[int, ...], stager: HostStager
) -> None:
    whole = sharded(init_device_mesh("cpu", (1, 1)), placements, *shape)
    state = {"plain": whole, "parameter": torch.nn.Parameter(whole)}

    assert stage_twice(stager, state) == []
    for made in stager.stage(state).state.values():
        assert isinstance(made, DTensor)
        assert (made.shape, made.stride(), made.dtype) == (whole.shape, whole.stride(), whole.dtype)
        assert (made.placements, made.device_mesh) == (whole.placements, whole.device_mesh)
        assert not made.requires_grad


@pytest.mark.usefixtures("alone")
def test_shards_are_judged_as_tensors_are(stager: HostStager) -> None:
    mesh = init_device_mesh("cpu", (1,))
    across = torch.randn(3, 4).t()
    assert stage_twice(stager, {"a": DTensor.from_local(across, mesh, [Shard(0)], run_check=False)}) == []

    with pytest.raises(StagingError, match="a is on the meta device"):
        stager.stage({"a": DTensor.from_local(torch.ones(3, device="meta"), mesh, [Shard(0)], run_check=False)})


@pytest.mark.usefixtures("alone")
def test_what_is_staged_is_what_dcp_writes(stager: HostStager, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    kinds = ("contiguous", "non_contiguous", "view_of_a_larger", "zero_dim", "bfloat16", "float8", "bool", "optimizer")

    def made() -> State:
        tensors = {name: KINDS[name](torch.device("cpu")) for name in kinds}
        return {**tensors, "sharded": sharded(mesh, [Shard(0)], 4, 3), "step": [1, 2]}

    state, other = made(), made()
    expected = reference(state)
    staged = stager.stage(state)
    spoil(state)
    dcp.save(staged.state, checkpoint_id=str(tmp_path))  # type: ignore[attr-defined]  # public, not re-exported
    dcp.load(other, checkpoint_id=str(tmp_path))  # type: ignore[attr-defined]  # public, not re-exported

    assert differences(other, expected) == []


def staged_on_rank() -> list[str]:
    """Stage tensors of which rank 1 of 2 has less or nothing; compare the whole of the copies."""
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "uneven": distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)]),
        "empty": distribute_tensor(torch.arange(3.0).view(1, 3), mesh, [Shard(0)]),
        "replicate": distribute_tensor(torch.arange(4.0), mesh, [Replicate()]),
    }
    expected = {key: value.full_tensor().clone() for key, value in state.items()}
    stager = HostStager()
    with CollectiveCounter() as counter:
        staged = stager.stage(state)
        spoil(state)
        staged.wait()
    found = [f"collectives: {counter.totals()}"] if any(counter.totals().values()) else []
    if state["empty"].to_local().numel() != (3, 0)[dist.get_rank()]:
        found.append("the shard of rank 1 is not empty")
    found += differences({key: value.full_tensor() for key, value in staged.state.items()}, expected)
    stager.close()
    return found


def test_shards_of_two_ranks(ranks: RankPool) -> None:
    assert ranks.run(staged_on_rank) == [[], []]
