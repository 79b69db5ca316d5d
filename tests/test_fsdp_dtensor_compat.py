"""Names of torch and Megatron-FSDP that ``compat.dtensor`` touches, and decisions that are made of plain data."""

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from megatron_ckpt_ext.compat.dtensor import (
    by_spec,
    chunk_of_megatron,
    flattened,
    innermost_first,
    local_of,
    rewrapped,
    shard_dim,
    split_factor,
    storage_prefix,
)
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.plan.dtensor_holdings import Entry, Spread
from megatron_ckpt_ext.plan.dtensor_optimizer import refuse_plain_optimizer_state


def stock_on_rank() -> list[tuple[object, object]]:
    """Pairs that must be equal: what we read, and what torch and Megatron do themselves."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata

    mesh = init_device_mesh("cpu", (2,))
    even = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
    planner = DefaultSavePlanner()
    nested = {"a": {"b": even}, "c": [1, {"d": 2}]}
    planner.set_up_planner(nested)
    item = next(each for each in planner.create_local_plan().items if each.index.fqn == "a.b")
    assert item.tensor_data is not None
    rank = dist.get_rank()
    cut = DTensor.from_local(torch.ones(4 - 3 * rank, 3), mesh, [Shard(0)], shape=torch.Size((5, 3)), stride=(3, 1))
    before = chunk_of_megatron(cut)
    update_uneven_dtensor_chunk_metadata(cut)
    return [
        (by_spec(even), (tuple(item.tensor_data.chunk.sizes), tuple(item.tensor_data.chunk.offsets))),
        (flattened(nested), (planner.state_dict, planner.mappings)),
        (local_of(even).data_ptr(), even.to_local().data_ptr()),
        ((before, chunk_of_megatron(cut)), (None, (4 * rank, 0))),
        *rewrapped_on_rank(even, cut),
        (innermost_first(mesh, (Shard(0),)), (0,)),
    ]


def rewrapped_on_rank(even: DTensor, cut: DTensor) -> list[tuple[object, object]]:
    """What must be equal of a DTensor and of the same one around another shard."""
    parameter = torch.nn.Parameter(even)
    assert isinstance(parameter, DTensor)
    copies = [(old, rewrapped(old, local_of(old).detach() + 1)) for old in (parameter, cut)]
    told = [each.__create_chunk_list__() for each in (local_of(copies[1][1]), local_of(cut))]  # type: ignore[attr-defined]
    return [
        (copies[0][1].full_tensor().tolist(), (even.full_tensor() + 1).tolist()),
        *(((new.shape, new.stride()), (old.shape, old.stride())) for old, new in copies),
        *(((new.device_mesh, new.placements), (old.device_mesh, old.placements)) for old, new in copies),
        *((type(new), DTensor) for _, new in copies),
        *((new.requires_grad, False) for _, new in copies),
        (chunk_of_megatron(copies[0][1]), None),
        ([(*chunk.offsets, *chunk.sizes) for chunk in told[0]], [(*chunk.offsets, *chunk.sizes) for chunk in told[1]]),
    ]


def test_torch_and_megatron_do_what_we_read_from_them(ranks: RankPool) -> None:
    for pairs in ranks.run(stock_and_compare_on_rank):
        assert pairs == []


def stock_and_compare_on_rank() -> list[str]:
    return [f"{ours} is not {theirs}" for ours, theirs in stock_on_rank() if str(ours) != str(theirs)]


def test_placements_tell_their_dimension_and_factor() -> None:
    placements = [Shard(1), _StridedShard(0, split_factor=3), Replicate()]

    assert [shard_dim(each) for each in placements] == [1, 0, None]
    assert [split_factor(each) for each in placements] == [1, 3, 1]


def test_file_names_are_torchs(tmp_path: object) -> None:
    writer = FileSystemWriter(str(tmp_path))
    plan = DefaultSavePlanner()
    plan.set_up_planner({"a": 1})

    (final,) = writer.prepare_global_plan([plan.create_local_plan()])

    assert final.storage_data == storage_prefix(0)


SPREAD = Spread(ranks="ab", mesh=(2,), shards=(0,), strides=(1,), order=(0,), coordinate=(0,))
WEIGHT = Entry("model.layer.weight", torch.float32, (4, 3), (7, 3), SPREAD)


def entries(key: str, *sizes: int) -> list[Entry]:
    return [WEIGHT, Entry(key, torch.float32, sizes, sizes)]


@pytest.mark.parametrize("sizes", [(4, 3), (7, 3)], ids=["of_the_shard", "of_the_whole"])
@pytest.mark.parametrize(
    "key",
    [
        "optim.state.layer.weight.exp_avg",
        "optimizer.state.model.layer.weight.exp_avg",
        "optimizer.state.module.model.layer.weight.master_param",
        "state.model.layer.weight.exp_avg",
    ],
)
def test_plain_state_of_a_sharded_parameter_is_refused_with_its_key(key: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(
        ConfigurationError, match=f"{key} is a plain tensor of shape .* model.layer.weight is a DTensor"
    ):
        refuse_plain_optimizer_state(entries(key, *sizes))


def test_plain_state_beside_sharded_state_of_the_same_entry_is_refused() -> None:
    sharded = WEIGHT._replace(key="state.0.exp_avg")
    with pytest.raises(ConfigurationError, match="state.0.exp_avg_sq is a plain tensor"):
        refuse_plain_optimizer_state([sharded, Entry("state.0.exp_avg_sq", torch.float32, (4, 3), (4, 3))])


@pytest.mark.parametrize("key", ["optimizer.state.0.exp_avg", "state.12.exp_avg"])
def test_plain_state_of_a_number_with_the_shape_of_any_shard_is_refused_with_its_key(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{key} is a plain tensor of shape .* get_optimizer_state_dict"):
        refuse_plain_optimizer_state(entries(key, 4, 3))


@pytest.mark.parametrize("sizes", [(12,), (3, 4), (1, 12)], ids=str)
def test_flattened_state_of_a_sharded_parameter_is_refused_with_its_key(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="layer.weight.exp_avg is a plain tensor of shape "):
        refuse_plain_optimizer_state(entries("optimizer.state.layer.weight.exp_avg", *sizes))


def test_state_with_the_shape_of_a_tensor_that_lies_on_one_rank_says_nothing_of_shards() -> None:
    alone = WEIGHT._replace(sizes=WEIGHT.shape)
    one = Entry("model.layer.bias", torch.float32, (1, 1), (2, 1), SPREAD)
    for entry in (
        Entry("state.0.exp_avg", torch.float32, (7, 3), (7, 3)),
        Entry("state.layer.weight.exp_avg", torch.float32, (21,), (21,)),
        Entry("state.layer.bias.growth", torch.float32, (1,), (1,)),
    ):
        refuse_plain_optimizer_state([alone, one, entry])


@pytest.mark.parametrize(
    ("key", "sizes"),
    [
        ("optimizer.state.0.step", (4, 3)),
        ("optimizer.state.0.scale", ()),
        ("optimizer.state.0.exp_avg", (12,)),
        ("optim.state.layer.weight.step", ()),
        ("optim.state.layer.weight.step", (4, 3)),
        ("optim.state.layer.weight.quantization_map", (256,)),
        ("optim.state.other.weight.exp_avg", (4, 3)),
        ("model.layer.scale", (4, 3)),
        ("model.state.weight", (4, 3)),
    ],
)
def test_scalars_and_what_has_a_shape_of_its_own_are_not(key: str, sizes: tuple[int, ...]) -> None:
    refuse_plain_optimizer_state(entries(key, *sizes))
