"""Shared memory without room for a save is a sentence on every rank, not a killed process."""

import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from ranks import RankPool
from workload import Job, save, state

from megatron_ckpt_ext.strategy import torch_dist

NAME = "SHARED_MEMORY"


def saved_with_little_room(directory: str, little: str) -> tuple[str, bool]:
    """Rank 1 finds a small file system in the place of shared memory; then it has room again."""
    job = Job(directory=directory, create=f"{directory}/prepared", extra={"cpu_shm_mode": True})
    strategy, usual = job.strategy(), getattr(torch_dist, NAME)
    large = {
        **state(1),
        "large": ShardedTensor.from_rank_offsets("large", torch.ones(200_000), (0, dist.get_rank(), 2)),
    }
    if dist.get_rank() == 1:
        setattr(torch_dist, NAME, little)
    try:
        save(strategy, f"{directory}/1", large)
        text = ""
    except Exception as error:
        text = str(error)
    finally:
        setattr(torch_dist, NAME, usual)
    save(strategy, f"{directory}/2", state(2))
    return text, (Path(directory) / "1" / ".metadata").exists()


def test_too_little_room_fails_the_save_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    little = tmp_path / "little"
    little.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(little)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        (text, published), other = ranks.run(saved_with_little_room, str(tmp_path), str(little))
    finally:
        subprocess.run(["umount", str(little)], check=True)

    assert other == (text, False)
    assert not published
    assert "rank 1: planning failed: OSError: " in text
    assert "bytes free and 80" in text  # 800,000 bytes of the large tensor, and the small ones
    assert "make it larger (docker: --shm-size)" in text
    assert (tmp_path / "2" / ".metadata").exists()
