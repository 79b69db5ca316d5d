"""The prepared file on node-local storage: ranks whose FILE means different directories stand for nodes.

A relative FILE and a working directory for each rank make that; the checkpoints themselves are shared, as always.
"""

import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import RankPool
from workload import COMMON, Job, checkpoint_values, heard, save, state, values

from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.commit.prepared_file import distribute_file
from megatron_ckpt_ext.compat.dcp import DistWrapper
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata

FILE = "prepared.metadata"


@dataclass(frozen=True, kw_only=True)
class Node:
    """What one rank finds in its working directory after the save, and what it warned about."""

    files: dict[str, bytes]
    warnings: list[str]
    collectives: dict[str, int]
    values: dict[str, Any]


@contextmanager
def on_node(directory: Path) -> Iterator[list[str]]:
    """Work in the directory of one node, and hear the package's warnings."""
    with chdir(directory), heard() as warnings:
        yield warnings


def save_on_node(job: Job, nodes: list[str]) -> Node:
    """Save one checkpoint with the rank's own working directory."""
    node = Path(nodes[dist.get_rank()])
    with on_node(node) as warnings, CollectiveCounter() as counter:
        state_dict = state(1)
        kept = values(state_dict)
        with counter.phase("save") as tally:
            save(job.strategy(), job.directory, state_dict)
    files = {path.name: path.read_bytes() for path in node.iterdir() if path.is_file()}
    return Node(files=files, warnings=warnings, collectives=tally.counts, values=kept)


def directories(parent: Path, *names: str) -> list[str]:
    for name in names:
        (parent / name).mkdir(exist_ok=True)
    return [str(parent / name) for name in names]


def created(ranks: RankPool, tmp_path: Path, nodes: list[str]) -> list[Node]:
    job = Job(directory=str(tmp_path / "step_1"), create=FILE)
    return ranks.run(save_on_node, job, nodes, world_size=len(nodes))


@pytest.mark.parametrize("nodes", [["a", "b"], ["a", "b", "a", "b"]], ids=["2_ranks", "2_ranks_a_node"])
def test_every_node_gets_the_same_file_and_can_reuse_it(ranks: RankPool, tmp_path: Path, nodes: list[str]) -> None:
    places = directories(tmp_path, *nodes)
    found = created(ranks, tmp_path, places)

    assert [list(node.files) for node in found] == [[FILE]] * len(nodes)
    assert len({node.files[FILE] for node in found}) == 1
    assert [node.warnings for node in found] == [[]] * len(nodes)

    job = Job(directory=str(tmp_path / "step_2"), reuse=FILE)
    reused = ranks.run(save_on_node, job, places, world_size=len(nodes))

    loaded = checkpoint_values(str(tmp_path / "step_2"))
    assert {key for node in reused for key in node.values} == loaded.keys() - COMMON


def test_only_node_local_storage_costs_a_broadcast(ranks: RankPool, tmp_path: Path) -> None:
    local = created(ranks, tmp_path, directories(tmp_path, "a", "b"))
    shared = created(ranks, tmp_path, directories(tmp_path, "c", "c"))

    for node, other in zip(local, shared, strict=True):
        assert node.collectives["broadcast_object_list"] == other.collectives["broadcast_object_list"] + 1
        assert node.collectives["all_gather_object"] == other.collectives["all_gather_object"]


def distribute_on_rank(nodes: list[str]) -> tuple[int, dict[str, int]]:
    """Distribute a file that is there; return when the rank's file was last replaced and the collectives."""
    with on_node(Path(nodes[dist.get_rank()])), CollectiveCounter() as counter:
        with counter.phase("distribute") as tally:
            distribute_file(FILE, identity_of(nodes[0]), DistWrapper(None, True, 0))
        return os.stat(FILE).st_ino, tally.counts


def identity_of(directory: str) -> str:
    return PreparedMetadata.load(os.path.join(directory, FILE), 0, 2).identity


def test_a_directory_that_has_the_file_is_not_written_again(ranks: RankPool, tmp_path: Path) -> None:
    nodes = directories(tmp_path, "a", "a")
    created(ranks, tmp_path, nodes)
    inode = os.stat(tmp_path / "a" / FILE).st_ino

    assert ranks.run(distribute_on_rank, nodes) == [(inode, {"all_gather_object": 1})] * 2


def test_one_rank_writes_for_each_directory(ranks: RankPool, tmp_path: Path) -> None:
    """Ranks 1 to 3 lack the file; 1 and 3 share a directory, in which one file appears and stays."""
    nodes = directories(tmp_path, "a", "b", "c", "b")
    found = ranks.run(create_then_watch_on_rank, str(tmp_path / "step_1"), nodes, world_size=4)

    assert found == [0, 1, 1, 0]


def create_then_watch_on_rank(directory: str, nodes: list[str]) -> int:
    """How many times this rank renamed a file to FILE while the coordinator's was distributed."""
    rank = dist.get_rank()
    with on_node(Path(nodes[rank])):
        save(Job(directory=directory, create=FILE).strategy(), directory, state(1))
        if rank != 0 and rank != 3:
            os.unlink(FILE)
        dist.barrier()
        renamed = 0
        real = os.rename

        def rename(source: Any, target: Any) -> None:
            nonlocal renamed
            renamed += 1
            real(source, target)

        os.rename = rename  # type: ignore[assignment]  # watched, and passed on
        try:
            distribute_file(
                FILE, PreparedMetadata.load(f"{nodes[0]}/{FILE}", 0, 4).identity, DistWrapper(None, True, 0)
            )
        finally:
            os.rename = real
        return renamed


def test_a_node_that_cannot_write_warns_and_the_save_succeeds(ranks: RankPool, tmp_path: Path) -> None:
    nodes = directories(tmp_path, "a", "b")
    (tmp_path / "b" / FILE).mkdir()

    found = created(ranks, tmp_path, nodes)

    assert found[0].warnings == []
    (warning,) = found[1].warnings
    assert FILE in warning
    assert "was not written on" in warning
    assert (tmp_path / "step_1" / ".metadata").exists()


def test_a_coordinator_that_cannot_write_warns_and_the_job_reuses_from_memory(ranks: RankPool, tmp_path: Path) -> None:
    nodes = directories(tmp_path, "a", "b")
    (tmp_path / "a" / FILE).mkdir()

    found = created(ranks, tmp_path, nodes)

    (warning,) = found[0].warnings
    assert "could not be written" in warning
    assert found[1].files == {}
    assert (tmp_path / "step_1" / ".metadata").exists()


def test_a_node_without_the_directory_warns(ranks: RankPool, tmp_path: Path) -> None:
    nodes = directories(tmp_path, "a", "b")
    (tmp_path / "a" / "deep").mkdir()
    job = Job(directory=str(tmp_path / "step_1"), create=f"deep/{FILE}")

    found = ranks.run(save_on_node, job, nodes)

    assert found[0].warnings == []
    (warning,) = found[1].warnings
    assert f"deep/{FILE}" in warning
    assert (tmp_path / "step_1" / ".metadata").exists()
