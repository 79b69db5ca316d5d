"""Drift that slots cannot absorb: the same save is completed by all ranks, and later saves reuse again."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import RankPool
from test_guard_on_ranks import CHANGES, Refusal, assert_holds, attempted, right_state
from workload import Job, save, values

from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """What one rank saw of one changed save and the one behind it: plain data."""

    first: Refusal
    second: Refusal
    objects: int
    """Object collectives of the second save."""
    warnings: list[str]
    held_equal_file: bool
    """Whether the rewritten file has the layout that this rank follows now."""


class Warnings(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def rebuilt_on_rank(job: Job, names: list[str], directory: str) -> dict[str, Rebuilt]:
    rank = dist.get_rank()
    found = {}
    for name in names:
        create = replace(job, create=f"{directory}/{name}.prepared", reuse=None)
        save(create.strategy(), f"{directory}/{name}_created", right_state(rank))
        reusing = replace(job, reuse=create.create)
        found[name] = changed_twice(reusing, name, directory)
    return found


def changed_twice(job: Job, name: str, directory: str) -> Rebuilt:
    rank, strategy = dist.get_rank(), job.strategy()
    logger, heard = logging.getLogger("megatron_ckpt_ext"), Warnings()
    seen, counter = [], CollectiveCounter()
    logger.addHandler(heard)
    for number in (1, 2):
        state = right_state(rank)
        CHANGES[name].apply(state, rank)
        kept = values(state)
        counter.start()
        with counter.phase(f"save {number}"):
            seen.append(replace(attempted(strategy, f"{directory}/{name}_{number}", state), changed=kept))
        counter.close()
    logger.removeHandler(heard)
    base = getattr(strategy, "base_strategy", strategy)
    assert job.reuse is not None
    file = PreparedMetadata.load(job.reuse, rank, dist.get_world_size())
    return Rebuilt(
        first=seen[0],
        second=seen[1],
        objects=sum(counter.totals()["save 2"].get(kind, 0) for kind in ("gather_object", "broadcast_object_list")),
        warnings=heard.texts,
        held_equal_file=file.slice == base.prepared.slice,
    )


@pytest.fixture(scope="module", params=["plain", "fully_parallel", "fully_parallel_cached"])
def rebuilt(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, list[dict[str, Rebuilt]]]:
    directory = tmp_path_factory.mktemp(request.param)
    job = Job(
        directory=str(directory),
        fully_parallel=request.param != "plain",
        cached_distribution=request.param == "fully_parallel_cached",
    )
    return directory, ranks.run(rebuilt_on_rank, job, list(CHANGES), str(directory))


@pytest.mark.parametrize("name", list(CHANGES))
def test_drift_completes_the_same_save(rebuilt: tuple[Path, list[dict[str, Rebuilt]]], name: str) -> None:
    directory, by_rank = rebuilt
    seen = [rank[name] for rank in by_rank]

    assert {rank.first.text for rank in seen} == {""}
    assert_holds(directory / f"{name}_1", [rank.first.changed for rank in seen])
    assert_holds(directory / f"{name}_2", [rank.second.changed for rank in seen])
    assert [rank.objects for rank in seen] == [1, 1]  # Megatron's own check of the common state
    assert [len(rank.warnings) for rank in seen] == [1, 0]
    assert "does not match the prepared metadata" in seen[0].warnings[0]
    assert all(rank.held_equal_file for rank in seen)
