"""Megatron-FSDP checkpoints that Megatron loads with another number of ranks, and saves again without training."""

from pathlib import Path

import pytest
from compare import differences_of_checkpoints
from jobs import STATE_DUMP, save_costs
from megatron_fsdp_jobs import run_fsdp_job

from megatron_ckpt_ext import latest_complete_step

OF_THE_JOB = ("rng_state", "num_floating_point_operations_so_far")
"""Left out on purpose; and what a job has computed, which is nothing where it trains nothing."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_two_ranks_saved_is_the_same_behind_four_and_behind_one(tmp_path: Path) -> None:
    """A job that loads its last iteration trains nothing and saves it, since it is no multiple of the interval."""
    folders = {ranks: tmp_path / f"of_{ranks}" for ranks in (2, 4, 1)}
    loaded = None
    for ranks, folder in folders.items():
        words = ("--swiglu", "--train-iters", "4", "--save-interval", "3", "--save", str(folder))
        load = () if loaded is None else ("--load", str(loaded), "--no-load-rng", "--no-save-rng")
        job = run_fsdp_job(f"job_{ranks}", (*words, *load), output=tmp_path, ranks=ranks, script=STATE_DUMP)
        steps = [cost.step for cost in save_costs(job)]
        assert steps == ([3, 4] if loaded is None else [4])
        assert latest_complete_step(str(folder)).step == 4
        loaded = folder

    for ranks in (4, 1):
        compared, different = differences_of_checkpoints(folders[2] / "iter_0000004", folders[ranks] / "iter_0000004")
        assert compared > 100
        assert [name for name in different if not name.startswith(OF_THE_JOB)] == []
