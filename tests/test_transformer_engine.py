"""Transformer Engine's extra state and quantized tensors in checkpoints, without Transformer Engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dtensor_jobs import assert_complete, differing, reusing
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from ranks import RankPool
from te_states import ENCODINGS, Layer, Quantized, extra_states
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from workload import Job, save

from megatron_ckpt_ext.commit.commit import Committed, How
from megatron_ckpt_ext.commit.failures import SaveFailedError
from megatron_ckpt_ext.compat.dtensor import flattened
from megatron_ckpt_ext.strategy.fsdp_dtensor import FsdpDtensorSaver

TOGETHER, REUSED, REBUILT = How.TOGETHER, How.REUSED, How.REBUILT
SLOT_BURSTING = 100_000
"""Values of a history: more bytes than the head room of any slot."""


def layers_of(encoding: str, seed: int) -> dict[str, Layer]:
    """Two layers: one as named, and one whose state is redundant, since it is empty."""
    return {"fp8": Layer(encoding, seed), "plain": Layer("empty", seed)}


def loaded(directory: str, encoding: str, names: list[str]) -> dict[str, Any]:
    """Load with stock megatron-core into layers of other values; return their histories."""
    layers = {name: layer for name, layer in layers_of(encoding, seed=99).items() if name in names}
    found = dist_checkpointing.load(extra_states(layers), directory)
    for name, layer in layers.items():
        layer.set_extra_state(found[f"{name}._extra_state"])
    return {name: layer.history for name, layer in layers.items()}


SERIES = (
    (1, ["fp8", "plain"]),
    (3, ["fp8", "plain"]),
    (SLOT_BURSTING, ["fp8", "plain"]),
    (SLOT_BURSTING + 1, ["fp8", "plain"]),
    (SLOT_BURSTING + 1, ["fp8"]),
    (SLOT_BURSTING + 2, ["fp8"]),
    (SLOT_BURSTING + 3, ["fp8", "plain"]),
)
"""Values of the history, and layers whose state is saved: it grows, bursts its slot; what is redundant is dropped."""


def extra_state_series_on_rank(directory: str, encoding: str) -> tuple[list[How], list[Any]]:
    """Save the series with one strategy; return how each went, and what stock megatron-core loads of it."""
    outcomes: list[Committed] = []
    job = Job(directory=directory, create=f"{directory}/prepared", extra={"on_commit": outcomes.append})
    strategy, layers, found = job.strategy(), layers_of(encoding, seed=1), []
    for number, (values, names) in enumerate(SERIES):
        layers["fp8"].history = [float(value) for value in range(values)]
        save(strategy, f"{directory}/{number}", extra_states({name: layers[name] for name in names}))
        found.append(loaded(f"{directory}/{number}", encoding, names))
    return [committed.how for committed in outcomes], found


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_extra_state_round_trips_however_it_is_encoded(ranks: RankPool, tmp_path: Path, encoding: str) -> None:
    has_state = encoding in ("uint8 tensor", "BytesIO")
    histories = [[float(value) for value in range(values)] if has_state else None for values, _ in SERIES]

    for how, found in ranks.run(extra_state_series_on_rank, str(tmp_path), encoding, world_size=2):
        assert how == [TOGETHER, REUSED, REBUILT if has_state else REUSED, REUSED, REBUILT, REUSED, REBUILT]
        assert [each["fp8"] for each in found] == histories
        assert [each.get("plain", "dropped") for each in found] == [None] * 4 + ["dropped"] * 2 + [None]


def quantized_torch_dist_on_rank(directory: str) -> tuple[list[How], list[bool], str]:
    """Save quantized weights twice; return how, whether stock loads what they stand for, and the dtype."""
    outcomes: list[Committed] = []
    job = Job(directory=directory, create=f"{directory}/prepared", extra={"on_commit": outcomes.append})
    strategy, same = job.strategy(), []
    place = (0, dist.get_rank(), dist.get_world_size())
    for number in (1, 2):
        weight = Quantized.of(seed=10 * number + dist.get_rank())
        save(strategy, f"{directory}/{number}", {"weight": ShardedTensor.from_rank_offsets("weight", weight, place)})
        target = torch.zeros(weight.shape, dtype=torch.bfloat16)
        found = dist_checkpointing.load(
            {"weight": ShardedTensor.from_rank_offsets("weight", target, place)}, f"{directory}/{number}"
        )
        same.append(torch.equal(found["weight"], weight.dequantize()))
    described = FileSystemReader(f"{directory}/2").read_metadata().state_dict_metadata["weight"]
    assert isinstance(described, TensorStorageMetadata)
    return [committed.how for committed in outcomes], same, str(described.properties.dtype)


def test_quantized_weights_are_saved_as_the_dtype_that_they_claim(ranks: RankPool, tmp_path: Path) -> None:
    for how, same, dtype in ranks.run(quantized_torch_dist_on_rank, str(tmp_path), world_size=2):
        assert how == [TOGETHER, REUSED]
        assert same == [True, True]
        assert dtype == "torch.bfloat16"


def fused_state(seed: int) -> dict[str, Any]:
    """A sharded model with quantized weights, and the state of a fused optimizer that knows of precision.

    Transformer Engine's ``FusedAdam`` keeps moments in fewer bits with a scale for each tensor, and of its masters the
    16 bits by which they differ from the bfloat16 parameter.
    """
    mesh, own = init_device_mesh("cpu", (dist.get_world_size(),)), torch.Generator().manual_seed(seed + dist.get_rank())
    weight = Quantized.of(seed + dist.get_rank())

    def sharded(local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    return {
        "model": {"weight": sharded(weight)},
        "optimizer": {
            "state": {
                "weight": {
                    "exp_avg": sharded(Quantized.of(seed + 100 + dist.get_rank())),
                    "exp_avg_sq": sharded(torch.rand(weight.shape, generator=own).half()),
                    "exp_avg_sq_scale": torch.tensor([0.5 + seed]),
                    "master_param": sharded(torch.randint(-9, 9, weight.shape, generator=own, dtype=torch.int16)),
                    "step": torch.tensor(float(seed)),
                }
            },
            "param_groups": [{"lr": 0.1, "step": seed}],
        },
    }


def plain(state: Any) -> Any:
    """This rank's values as they stand for, detached from quantization."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    local = state.to_local() if isinstance(state, DTensor) else state
    return local.dequantize() if isinstance(local, Quantized) else local


def emptied(state: Any) -> Any:
    """The same of dense tensors and other values, to load into."""
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        return DTensor.from_local(torch.zeros_like(plain(state)), state.device_mesh, state.placements, run_check=False)
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else state


def fused_on_rank(directory: str) -> tuple[list[How], list[str]]:
    """Save twice with a saver that makes the file, and with one that follows it; return what torch loads wrongly."""
    file, how, wrong = f"{directory}/prepared", [], []
    for first in (1, 3):
        made = reusing(file) if first == 3 else None
        with FsdpDtensorSaver(prepared_metadata=made, ckpt_metadata_create_path=None if made else file) as saver:
            for seed in (first, first + 1):
                state = fused_state(seed)
                assert isinstance(state["model"]["weight"].to_local(), Quantized)
                how.append(saver.save(state, f"{directory}/{seed}").wait().committed.how)
                found = emptied(state)
                dcp.load(found, checkpoint_id=f"{directory}/{seed}")  # type: ignore[attr-defined]  # public, not re-exported
                wrong += differing(flattened(plain(found))[0], flattened(plain(state))[0])
    return how, wrong


def test_a_precision_aware_optimizer_beside_sharded_parameters_round_trips(ranks: RankPool, tmp_path: Path) -> None:
    for how, wrong in ranks.run(fused_on_rank, str(tmp_path), world_size=2):
        assert how == [TOGETHER, REUSED, REUSED, REUSED]
        assert wrong == []
    for seed in (1, 2, 3, 4):
        assert_complete(tmp_path / str(seed))


def unsharded_moment_on_rank(directory: str) -> str:
    """Save with a moment that a rank made for its own shard, as no DTensor; return why that was refused."""
    state = fused_state(1)
    state["optimizer"]["state"]["weight"]["exp_avg"] = Quantized.of(5)
    with FsdpDtensorSaver() as saver, pytest.raises(SaveFailedError) as refused:
        saver.save(state, f"{directory}/1").wait()
    return str(refused.value)


def test_a_quantized_moment_of_one_rank_is_refused_by_its_key(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(unsharded_moment_on_rank, str(tmp_path), world_size=2):
        assert "optimizer.state.weight.exp_avg" in said
