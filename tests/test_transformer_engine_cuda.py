"""The same with the real Transformer Engine on a GPU, where it is installed. Never run so far: neither was at hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from ranks import RankPool
from workload import Job, save

from megatron_ckpt_ext import CheckpointManager
from megatron_ckpt_ext.commit.commit import Committed, How

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: real FP8 state is under test"),
]
WIDTH = 32
"""FP8 products want multiples of 16."""


def trained(steps: int, *, quantized: bool) -> tuple[Any, Any]:
    """A layer of Transformer Engine that has trained in FP8, and its optimizer, with moments of two bytes."""
    te = pytest.importorskip("transformer_engine.pytorch")
    with te.fp8_model_init(enabled=quantized):
        layer = te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device="cuda")
    moments = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=0.01, master_weights=True, **moments)
    for _ in range(steps):
        with te.fp8_autocast(enabled=True):
            layer(torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer, optimizer


def sharded(layer: Any) -> dict[str, Any]:
    """What megatron-core makes of it: extra state as an object, the rest as tensors of one rank."""
    state = layer.state_dict()
    extra = make_sharded_object_for_checkpoint(state.pop("_extra_state"), "_extra_state", replica_id=(0, 0, 0))
    return {"_extra_state": extra} | {
        name: ShardedTensor.from_rank_offsets(name, value.detach()) for name, value in state.items()
    }


def dense(state: Any) -> dict[str, torch.Tensor]:
    return {name: each.dequantize() if hasattr(type(each), "dequantize") else each for name, each in state.items()}


def torch_dist_on_rank(directory: str, quantized: bool) -> tuple[list[How], list[str]]:
    """Save a trained layer twice; return how, and what stock megatron-core loads wrongly into a fresh one."""
    outcomes: list[Committed] = []
    job = Job(directory=directory, create=f"{directory}/prepared", extra={"on_commit": outcomes.append})
    strategy, wrong = job.strategy(), []
    for steps in (2, 5):
        layer, _ = trained(steps, quantized=quantized)
        save(strategy, f"{directory}/{steps}", sharded(layer))
        fresh, _ = trained(1, quantized=False)
        found = dist_checkpointing.load(sharded(fresh), f"{directory}/{steps}")
        expected = dense({name: each for name, each in layer.state_dict().items() if name != "_extra_state"})
        wrong += [name for name, value in expected.items() if not torch.equal(found[name].float(), value.float())]
        if not torch.equal(torch.as_tensor(found["_extra_state"]), torch.as_tensor(layer.get_extra_state())):
            wrong.append("_extra_state")
    return [committed.how for committed in outcomes], wrong


@pytest.mark.parametrize("quantized", [False, True])
def test_a_layer_that_trains_in_fp8_round_trips(ranks: RankPool, tmp_path: Path, quantized: bool) -> None:
    pytest.importorskip("transformer_engine")
    ((how, wrong),) = ranks.run(torch_dist_on_rank, str(tmp_path), quantized, world_size=1)

    assert how == [How.TOGETHER, How.REUSED]
    assert wrong == []


def test_a_fused_optimizer_that_knows_of_precision_round_trips(tmp_path: Path) -> None:
    pytest.importorskip("transformer_engine")
    _, optimizer = trained(3, quantized=False)
    _, fresh = trained(1, quantized=False)
    with CheckpointManager(str(tmp_path), async_save=True) as manager:
        manager.save(1, {"optimizer": optimizer.state_dict()})
        manager.wait()
        state = {"optimizer": fresh.state_dict()}
        assert manager.load(state) == 1

    saved = optimizer.state_dict()["state"]
    for number, values in state["optimizer"]["state"].items():
        assert {name for name, each in values.items() if not torch.equal(each, saved[number][name])} == set()
