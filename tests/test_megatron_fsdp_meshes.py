"""Jobs of Megatron-FSDP whose shards lie otherwise: experts, meshes of replicas, and both."""

from pathlib import Path
from typing import Any

import pytest
from jobs import SAVING, STATE_DUMP, save_costs
from megatron_fsdp_jobs import run_fsdp_job
from shard_dump import differences_from_memory
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_ckpt_ext import latest_complete_step, verify_checkpoint
from megatron_ckpt_ext.events import Phase

EXPERTS = ("--num-experts", "4", "--disable-bias-linear")
"""With biases Megatron's sequential experts write into a view, which autograd refuses on the CPU."""
EXPERT_PARALLEL = (*EXPERTS, "--expert-model-parallel-size", "2")
REPLICAS = ("--num-distributed-optimizer-instances", "2", "--overlap-grad-reduce", "--overlap-param-gather")
"""Two copies of everything, each sharded over half of the ranks. Without overlap Megatron never adds up their
gradients: the copies train apart, and a checkpoint of one of them is not that of the other."""
EXPERT_RNG = "rng_state.(0, 0).0.rng_tracker_states.expert-parallel-rng"
"""Megatron gives it one key on all ranks that have different experts, so one rank's is saved."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, EXPERTS), (2, EXPERT_PARALLEL), (4, REPLICAS), (4, (*EXPERT_PARALLEL, *REPLICAS))],
    ids=["experts", "expert_parallel", "replicas", "expert_parallel_replicas"],
)
def test_a_job_resumes_and_reuses(tmp_path: Path, ranks: int, options: tuple[str, ...]) -> None:
    folder = tmp_path / "checkpoints"
    common: dict[str, Any] = {"output": tmp_path, "ranks": ranks, "script": STATE_DUMP}
    metadata = ("--ckpt-metadata", str(tmp_path / "prepared"), "--ckpt-metadata-create")
    words = ("--swiglu", *options)
    stock = run_fsdp_job("stock", words, kind="stock", stock=True, without=SAVING, **common)
    first = run_fsdp_job("first", (*words, *metadata, "--exit-interval", "4"), **common)
    resumed = (*words, *metadata, "--load", str(folder), "--save-interval", "2")
    again = run_fsdp_job("again", resumed, **common)

    assert first.losses | again.losses == stock.losses
    assert sorted(again.losses) == [5, 6, 7, 8]
    assert [cost.collectives.objects for cost in save_costs(first)] == [5]
    assert [cost.collectives.objects for cost in save_costs(again)] == [0, 0]
    assert [event.reason for event in again.events if event.phase is Phase.REBUILD] == []
    for step, job in ((4, first), (6, again), (8, again)):
        checkpoint = folder / f"iter_{step:07d}"
        compared, different = differences_from_memory(checkpoint, job.dump, step, ranks=ranks)
        assert compared > 100
        assert set(different) <= ({EXPERT_RNG} if "--expert-model-parallel-size" in options else set())
        assert verify_checkpoint(checkpoint).complete
    assert latest_complete_step(str(folder)).step == 8
    if "--num-experts" in options:
        keys = FileSystemReader(folder / "iter_0000008").read_metadata().state_dict_metadata
        split = {key.split("local_experts.")[1] for key in keys if key.startswith("model.") and "local_experts" in key}
        halves = {f"{n}.linear_fc1.weight_{half}" for n in range(4) for half in "wv"}
        assert split == halves | {f"{n}.linear_fc2.weight" for n in range(4)}
