"""The layout guard on real ranks: every change of what a job holds is refused by all of them, and nothing appears.

One call of the pool runs all changes of one way to save, each followed by a save of the right state dict with the
same strategy object; the tests look at what each left.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from ranks import RankPool
from workload import Job, StateDict, checkpoint_values, same, save, values

from megatron_ckpt_ext.commit.commit import OnDrift
from megatron_ckpt_ext.commit.failures import MetadataReuseError, SaveFailedError


def own_tensor(name: str, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> ShardedTensor:
    """A tensor that one rank holds and all of which it writes."""
    return ShardedTensor.from_rank_offsets(f"{name}.{rank}", torch.randn(*shape).to(dtype))


def replicated_tensor(name: str, rank: int, main: int = 0) -> ShardedTensor:
    """A tensor that all ranks hold, equal on each; ``main`` writes it unless the save is distributed."""
    generator = torch.Generator().manual_seed(len(name))
    world = dist.get_world_size()
    return ShardedTensor.from_rank_offsets(
        name, torch.randn(4, 6, generator=generator), replica_id=(rank - main) % world
    )


def replicated_object(name: str, rank: int) -> ShardedObject:
    return ShardedObject(name, {"lr": 0.25}, (1,), (0,), replica_id=rank)


def right_state(rank: int) -> StateDict:
    """Every part of it is whole on one rank, so a change on one rank passes Megatron's own validation."""
    return {
        "front": ShardedObject(f"front.{rank}", "text" * rank, (1,), (0,)),
        "settings": replicated_object("settings", rank),
        "left": own_tensor("left", rank, 4, 6),
        "middle": own_tensor("middle", rank, 2, 6, dtype=torch.float16),
        "shared": replicated_tensor("shared", rank),
        "shared_too": replicated_tensor("shared_too", rank),
        "right": own_tensor("right", rank, 4, 6),
        "end": own_tensor("end", rank, 5),
    }


def tensor_added(state: StateDict, rank: int) -> None:
    state["added"] = own_tensor("added", rank, 3)


def replicated_tensor_added(state: StateDict, rank: int) -> None:
    state["added"] = replicated_tensor("added", rank)


def replicated_object_added(state: StateDict, rank: int) -> None:
    state["added"] = replicated_object("added", rank)


def removed_at_the_end(state: StateDict, rank: int) -> None:
    del state["end"]


def removed_in_the_middle(state: StateDict, rank: int) -> None:
    del state["middle"]


def replicated_tensor_removed(state: StateDict, rank: int) -> None:
    del state["shared"]


def resized(state: StateDict, rank: int) -> None:
    state["left"] = own_tensor("left", rank, 4, 7)


def shifted(state: StateDict, rank: int) -> None:
    state["front"].data = "more than a slot has room for" * 100


def moved(state: StateDict, rank: int) -> None:
    if rank == 0:
        del state["left"]
    elif rank == 1:
        state["more"] = own_tensor("left", 0, 4, 6)


def swapped(state: StateDict, rank: int) -> None:
    state["left"], state["right"] = state["right"], state["left"]


def reshaped(state: StateDict, rank: int) -> None:
    state["middle"] = own_tensor("middle", rank, 6, 2, dtype=torch.float16)


def retyped(state: StateDict, rank: int) -> None:
    state["middle"] = own_tensor("middle", rank, 2, 6, dtype=torch.bfloat16)


def emptied_on_one_rank(state: StateDict, rank: int) -> None:
    if rank == 1:
        state.clear()


def resized_on_one_rank(state: StateDict, rank: int) -> None:
    if rank == 1:
        resized(state, rank)


def shifted_on_one_rank(state: StateDict, rank: int) -> None:
    if rank == 1:
        shifted(state, rank)


def written_by_another_replica(state: StateDict, rank: int) -> None:
    state["shared"] = replicated_tensor("shared", rank, main=1)


def grown_in_its_slot(state: StateDict, rank: int) -> None:
    state["front"].data = "not much more" * 50


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the state dict and what the error must say about it."""

    apply: Callable[[StateDict, int], None]
    item: str
    """Pattern of the item's name."""
    prepared: str
    found: str
    rank: int = 0
    """The lowest rank that must notice."""


TENSOR = r"float\d+ \d+x\d+ of \d+x\d+"
PLACE = r"__\d+_0\.distcp\[\d+:\d+\]"
NOTHING = "nothing"
CHANGES = {
    change.apply.__name__: change
    for change in (
        Change(apply=tensor_added, item=r"added\.0 at offset \[0\]", prepared=NOTHING, found="float32 3 of 3"),
        Change(apply=replicated_tensor_added, item=r"added at offset \[0, 0\]", prepared=NOTHING, found=TENSOR),
        Change(apply=replicated_object_added, item=r"added/shard_0_1", prepared=NOTHING, found="object"),
        Change(apply=removed_at_the_end, item=r"end\.0 at offset \[0\]", prepared="float32 5 of 5", found=NOTHING),
        Change(apply=removed_in_the_middle, item=r"middle\.0 at offset \[0, 0\]", prepared=TENSOR, found=NOTHING),
        Change(apply=replicated_tensor_removed, item=r"shared at offset .*", prepared=TENSOR, found=NOTHING),
        Change(apply=resized, item=r"left\.0 at offset .*", prepared=".* 4x6", found=".* 4x7"),
        Change(apply=shifted, item=r"front\.0/shard_0_1", prepared=PLACE, found=PLACE),
        Change(apply=moved, item=r"left\.0 at offset \[0, 0\]", prepared=TENSOR, found=NOTHING),
        Change(apply=swapped, item=r"left\.0 at offset .*", prepared=PLACE, found=PLACE),
        Change(apply=reshaped, item=r"middle\.0 at offset .*", prepared=".* 2x6 of 2x6", found=".* 6x2 of 6x2"),
        Change(apply=retyped, item=r"middle\.0 at offset .*", prepared="float16 .*", found="bfloat16 .*"),
        Change(apply=emptied_on_one_rank, item=r".*", prepared=".*", found=NOTHING, rank=1),
        Change(apply=resized_on_one_rank, item=r"left\.1 at offset .*", prepared=".* 4x6", found=".* 4x7", rank=1),
        Change(apply=shifted_on_one_rank, item=r"front\.1/shard_0_1", prepared=PLACE, found=PLACE, rank=1),
    )
}


@dataclass(frozen=True, kw_only=True)
class Harmless:
    """A change that leaves the layout as it is."""

    apply: Callable[[StateDict, int], None]
    only_distributed: bool = False
    """Whether it is harmless only where the writers are chosen anew."""


HARMLESS = {
    "grown_in_its_slot": Harmless(apply=grown_in_its_slot),
    "written_by_another_replica": Harmless(apply=written_by_another_replica, only_distributed=True),
}


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


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What one rank saw of one changed save: plain data."""

    error: str
    """Qualified name; empty if the save went through."""
    text: str
    causes: dict[int, str]
    changed: dict[str, Any] = field(default_factory=dict)
    """Content of that save."""
    right: dict[str, Any] = field(default_factory=dict)
    """Content of the right save behind it."""


def refused_on_rank(way: Way, directory: str) -> dict[str, Refusal]:
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


def attempted(strategy: Any, directory: str, state: StateDict) -> Refusal:
    try:
        save(strategy, directory, state)
    except SaveFailedError as error:
        return Refusal(error=type(error).__name__, text=str(error), causes=error.causes)
    return Refusal(error="", text="", causes={})


@dataclass(frozen=True, kw_only=True)
class Refusals:
    """What all ranks saw of all changes in one way to save."""

    way: Way
    directory: Path
    by_rank: list[dict[str, Refusal]]


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


def assert_says(refusal: Refusal, change: Change, way: Way) -> None:
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
    assert [path.name for path in directory.iterdir() if path.suffix != ".distcp"] == []


def assert_holds(directory: Path, held_by_rank: list[dict[str, Any]]) -> None:
    found = checkpoint_values(str(directory))
    expected = {key: value for held in held_by_rank for key, value in held.items()}
    assert found.keys() == expected.keys() | {"common_state/shard_0_1"}
    assert [key for key, value in expected.items() if not same(found[key], value)] == []
