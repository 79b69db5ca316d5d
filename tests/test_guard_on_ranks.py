"""The layout guard on real ranks: every change of what a job holds is refused by all of them, and nothing appears.

One call of the pool runs all changes of one way to save, each followed by a save of the right state dict with the
same strategy object; the tests look at what each left.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from changes import CHANGES, HARMLESS, NOTHING, PLACE, Attempt, Change, attempted, right_state
from ranks import RankPool
from workload import BESIDE, Job, assert_holds, save, values

from megatron_ckpt_ext.commit.commit import OnDrift
from megatron_ckpt_ext.commit.failures import MetadataReuseError


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to save, in which every change must be noticed."""

    world_size: int = 2
    fully_parallel: bool = False
    cached_distribution: bool = False
    plain: bool = False
    """Whether a checkpoint's own ``.metadata`` is reused, which names no holders."""

    def strategy(self, directory: Path) -> Any:
        """Save the right state dict once with a strategy that creates; return one that reuses, already used."""
        job = Job(
            directory=str(directory),
            fully_parallel=self.fully_parallel,
            cached_distribution=self.cached_distribution,
            create=str(directory / "prepared.metadata"),
        )
        save(job.strategy(), str(directory / "created"), right_state(dist.get_rank()))
        source = directory / "created" / ".metadata" if self.plain else directory / "prepared.metadata"
        reusing = replace(job, create=None, reuse=str(source), extra={"on_drift": OnDrift.FAIL}).strategy()
        save(reusing, str(directory / "reused"), right_state(dist.get_rank()))
        return reusing


WAYS = {
    "plain_strategy": Way(),
    "fully_parallel": Way(fully_parallel=True),
    "fully_parallel_cached": Way(fully_parallel=True, cached_distribution=True),
    "fully_parallel_on_4": Way(world_size=4, fully_parallel=True),
    "checkpoint_metadata": Way(plain=True),
    "checkpoint_metadata_cached": Way(plain=True, fully_parallel=True, cached_distribution=True),
}


def refused_on_rank(way: Way, directory: str) -> dict[str, Attempt]:
    rank = dist.get_rank()
    strategy = way.strategy(Path(directory))
    found = {}
    appliers = [(name, change.apply) for name, change in CHANGES.items()]
    appliers += [(name, harmless.apply) for name, harmless in HARMLESS.items()]
    for name, apply in appliers:
        state = right_state(rank)
        apply(state, rank)
        right = right_state(rank)
        changed, kept = values(state), values(right)
        found[name] = replace(attempted(strategy, f"{directory}/{name}", state), changed=changed, right=kept)
        save(strategy, f"{directory}/after_{name}", right)
    return found


@dataclass(frozen=True, kw_only=True)
class Refusals:
    """What all ranks saw of all changes in one way to save."""

    way: Way
    directory: Path
    by_rank: list[dict[str, Attempt]]


@pytest.fixture(scope="module", params=list(WAYS))
def refusals(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Refusals:
    way = WAYS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    by_rank = ranks.run(refused_on_rank, way, str(directory), world_size=way.world_size)
    return Refusals(way=way, directory=directory, by_rank=by_rank)


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_is_refused_on_all_ranks_and_leaves_nothing(refusals: Refusals, name: str) -> None:
    seen = [rank[name] for rank in refusals.by_rank]

    assert {refusal.error for refusal in seen} == {MetadataReuseError.__name__}
    assert len({refusal.text for refusal in seen}) == 1
    assert_says(seen[0], CHANGES[name], refusals.way)
    assert_unpublished(refusals.directory / name)
    assert_holds(refusals.directory / f"after_{name}", [refusal.right for refusal in seen])


@pytest.mark.parametrize("name", list(HARMLESS))
def test_a_change_that_leaves_the_layout_is_published(refusals: Refusals, name: str) -> None:
    seen = [rank[name] for rank in refusals.by_rank]

    if HARMLESS[name].only_distributed and not refusals.way.fully_parallel:
        assert {refusal.error for refusal in seen} == {MetadataReuseError.__name__}
        assert "shared at offset [0, 0] does not match" in seen[0].text
        assert_unpublished(refusals.directory / name)
    else:
        assert {refusal.text for refusal in seen} == {""}
        assert_holds(refusals.directory / name, [refusal.changed for refusal in seen])


def assert_says(refusal: Attempt, change: Change, way: Way) -> None:
    """The one cause names the item and both sides."""
    ((rank, cause),) = refusal.causes.items()
    found = re.fullmatch(r"(.*) does not match the prepared metadata: prepared (.*), found (.*)", cause)
    assert found is not None
    assert refusal.text == (f"checkpoint save failed (metadata_reuse), nothing was published. rank {rank}: {cause}")
    assert rank == change.rank
    assert re.fullmatch(change.item, found[1])
    if way.plain and found[2] != NOTHING:
        assert re.fullmatch(f"{PLACE}|{change.prepared}", found[2])
    else:
        assert re.fullmatch(change.prepared, found[2])
    assert re.fullmatch(change.found, found[3])


def assert_unpublished(directory: Path) -> None:
    """Data files may be there; nothing that makes a checkpoint of them, nor a temporary file."""
    assert {path.name for path in directory.iterdir() if path.suffix != ".distcp"} <= BESIDE
