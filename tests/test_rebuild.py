"""Drift that slots cannot absorb: the same save is completed by all ranks, and later saves reuse again."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from changes import CHANGES, Attempt, attempted, replicated_tensor, replicated_tensor_added, right_state
from ranks import RankPool
from workload import BESIDE, Job, StateDict, assert_holds, checkpoint_values, heard, save, values

from megatron_ckpt_ext.commit.commit import Committed, How
from megatron_ckpt_ext.commit.failures import WriteFailedError
from megatron_ckpt_ext.compat.mcore import FullyParallelSaveStrategyWrapper, TorchDistSaveShardedStrategy
from megatron_ckpt_ext.emulation import CpuEmulation
from megatron_ckpt_ext.metadata.layout import Item
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

REUSED, REBUILT, TOGETHER = How.REUSED.value, How.REBUILT.value, How.TOGETHER.value
WAYS: dict[str, dict[str, bool]] = {
    "plain": {},
    "fully_parallel": {"fully_parallel": True},
    "fully_parallel_cached": {"fully_parallel": True, "cached_distribution": True},
}
COMPLETED = [name for name in CHANGES if name != "emptied_on_one_rank"]
"""The other one loses what nobody else wrote, where replicas are distributed; it has tests of its own below."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """What one rank saw of several saves with one strategy: plain data."""

    saves: list[Attempt]
    how: list[str]
    """How each published save got its layout."""
    reasons: list[str | None]
    warnings: list[str]
    file_is_current: bool
    """Whether the prepared file has the layout that this rank follows now."""


def created_on_rank(job: Job, directory: str) -> str:
    """Make a prepared file with the right state; return its path."""
    file = f"{directory}/prepared.metadata"
    save(replace(job, create=file, reuse=None).strategy(), f"{directory}/created", right_state(dist.get_rank()))
    return file


def series(job: Job, directory: str, *states: Callable[[PreparedSaveStrategy], StateDict]) -> Series:
    """Save ``1``, ``2``, ... with one strategy that reuses; each state is built when its turn comes."""
    committed: list[Committed] = []
    strategy = replace(job, extra={**job.extra, "on_commit": committed.append}).strategy()
    base: PreparedSaveStrategy = getattr(strategy, "base_strategy", strategy)
    saves = []
    with heard() as warnings:
        for number, build in enumerate(states, start=1):
            state = build(base)
            kept = values(state)
            saves.append(replace(attempted(strategy, f"{directory}/{number}", state), changed=kept))
    assert job.reuse is not None
    file = PreparedMetadata.load(job.reuse, dist.get_rank(), dist.get_world_size())
    return Series(
        saves=saves,
        how=[each.how.value for each in committed],
        reasons=[each.reason for each in committed],
        warnings=warnings,
        file_is_current=base.prepared is not None and file.slice == base.prepared.slice,
    )


def changed(name: str) -> Callable[[PreparedSaveStrategy], StateDict]:
    def build(strategy: PreparedSaveStrategy) -> StateDict:
        state = right_state(dist.get_rank())
        CHANGES[name].apply(state, dist.get_rank())
        return state

    return build


def right(strategy: PreparedSaveStrategy) -> StateDict:
    return right_state(dist.get_rank())


def every_change_on_rank(job: Job, directory: str) -> dict[str, Series]:
    found = {}
    for name in COMPLETED:
        place = f"{directory}/{name}"
        Path(place).mkdir(exist_ok=True)
        dist.barrier()
        reusing = replace(job, reuse=created_on_rank(job, place))
        found[name] = series(reusing, place, changed(name), changed(name))
    return found


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What all ranks saw of all changes in one way to save."""

    directory: Path
    by_rank: list[dict[str, Series]]


@pytest.fixture(scope="module", params=list(WAYS))
def changes(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Changes:
    directory = tmp_path_factory.mktemp(request.param)
    job = Job(directory=str(directory), **WAYS[request.param])  # type: ignore[arg-type]
    return Changes(directory=directory, by_rank=ranks.run(every_change_on_rank, job, str(directory)))


@pytest.mark.parametrize("name", COMPLETED)
def test_drift_completes_the_same_save(changes: Changes, name: str) -> None:
    directory, seen = changes.directory / name, [rank[name] for rank in changes.by_rank]

    assert [[each.text for each in rank.saves] for rank in seen] == [["", ""]] * 2
    for number in (0, 1):
        assert_holds(directory / str(number + 1), [rank.saves[number].changed for rank in seen])
    assert [rank.how for rank in seen] == [[REBUILT, REUSED]] * 2
    assert seen[0].reasons == seen[1].reasons
    noticed = f"rank {CHANGES[name].rank}: "
    assert str(seen[0].reasons[0]).startswith(noticed)
    assert "does not match the prepared metadata" in str(seen[0].reasons[0])
    (warning,) = seen[0].warnings
    assert str(seen[0].reasons[0]) in warning
    assert seen[1].warnings == []
    assert all(rank.file_is_current for rank in seen)


# The one change that cannot be completed: what its writer has lost, the others hold and did not write.

REPLICATED = {Item("shared", (0, 0)), Item("shared_too", (0, 0))}


def without_replica(strategy: PreparedSaveStrategy, *, written: bool) -> StateDict:
    """Rank 1 does not hold a replicated tensor any more: the one that it writes, or the one that rank 0 writes."""
    state = right_state(dist.get_rank())
    if dist.get_rank() == 1 and strategy.prepared is not None:
        (item,) = (each for each in REPLICATED if (each in strategy.prepared.slice.locators) == written)
        del state[item.fqn]
    return state


def lost_by_its_writer(strategy: PreparedSaveStrategy) -> StateDict:
    return without_replica(strategy, written=True)


def lost_by_a_reader(strategy: PreparedSaveStrategy) -> StateDict:
    return without_replica(strategy, written=False)


def emptied(strategy: PreparedSaveStrategy) -> StateDict:
    return changed("emptied_on_one_rank")(strategy)


def lost_on_rank(job: Job, directory: str, first: Callable[[PreparedSaveStrategy], StateDict]) -> Series:
    """A replica is lost, then the right state is saved twice."""
    return series(replace(job, reuse=created_on_rank(job, directory)), directory, first, right, right)


@pytest.mark.parametrize("lost", [lost_by_its_writer, emptied], ids=["one_tensor", "everything"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_replica_that_its_writer_lost_fails_the_save_and_the_next_is_planned_together(
    ranks: RankPool, tmp_path: Path, cached: bool, lost: Callable[[PreparedSaveStrategy], StateDict]
) -> None:
    job = Job(directory=str(tmp_path), fully_parallel=True, cached_distribution=cached)

    seen = ranks.run(lost_on_rank, job, str(tmp_path), lost)

    first = [rank.saves[0] for rank in seen]
    assert [each.error for each in first] == [WriteFailedError.__name__] * 2
    assert first[0].text == first[1].text
    ((rank, cause),) = first[0].causes.items()
    made = PreparedMetadata.load(str(tmp_path / "created" / ".metadata"), 1, 2)
    (item,) = REPLICATED & made.slice.locators.keys()
    assert rank == 0
    assert f"rank 0 still holds {item}, but nobody wrote it: the rank that used to write it has lost it" in cause
    assert unpublished(tmp_path / "1")
    for number in (1, 2):
        assert_holds(tmp_path / str(number + 1), [each.saves[number].changed for each in seen])
    assert [each.how for each in seen] == [[TOGETHER, REUSED]] * 2
    assert all(each.file_is_current for each in seen)


@pytest.mark.parametrize(
    ("way", "lost"),
    [("plain", emptied), ("fully_parallel", lost_by_a_reader), ("fully_parallel_cached", lost_by_a_reader)],
)
def test_a_replica_that_another_rank_writes_may_be_lost(
    ranks: RankPool, tmp_path: Path, way: str, lost: Callable[[PreparedSaveStrategy], StateDict]
) -> None:
    job = Job(directory=str(tmp_path), **WAYS[way])  # type: ignore[arg-type]

    seen = ranks.run(lost_on_rank, job, str(tmp_path), lost)

    for number in (0, 1, 2):
        assert_holds(tmp_path / str(number + 1), [each.saves[number].changed for each in seen])
    assert [each.how for each in seen] == [[REBUILT, REBUILT, REUSED]] * 2


def taken_over(strategy: PreparedSaveStrategy) -> StateDict:
    """What rank 0 alone held is on both, and rank 1 is to write it; rank 0 writes it too, as the layout says."""
    rank = dist.get_rank()
    state = right_state(rank)
    state["left" if rank == 0 else "more"] = replicated_tensor("left.0", rank, main=1)
    return state


def take_over_on_rank(job: Job, directory: str) -> Series:
    return series(replace(job, reuse=created_on_rank(job, directory)), directory, taken_over, taken_over)


def test_a_tensor_that_two_ranks_write_is_in_the_layout_once(ranks: RankPool, tmp_path: Path) -> None:
    seen = ranks.run(take_over_on_rank, Job(directory=str(tmp_path), fully_parallel=True), str(tmp_path))

    for number in (0, 1):
        assert_holds(tmp_path / str(number + 1), [each.saves[number].changed for each in seen])
    assert [each.how for each in seen] == [[REBUILT, REUSED]] * 2
    assert str(seen[0].reasons[0]).startswith("rank 1: left.0 at offset [0, 0] does not match")


def unpublished(directory: Path) -> bool:
    """Data files may be there; nothing that makes a checkpoint of them, nor a temporary file."""
    return all(path.suffix == ".distcp" or path.name in BESIDE for path in directory.iterdir())


# Megatron's cached distribution knows nothing of what was added after it was made.


def added_on_rank(directory: str, blocked: bool) -> dict[str, Any]:
    """Save, fail to save if ``blocked``, and save with a new replicated tensor, all with one wrapper that caches."""
    job = Job(directory=directory, fully_parallel=True, cached_distribution=True, create=f"{directory}/prepared")
    strategy = job.strategy()
    save(strategy, f"{directory}/before", right_state(dist.get_rank()))
    if blocked:
        Path(directory, "blocked", "__1_0.distcp", "in the way").mkdir(parents=True, exist_ok=True)
        attempt = attempted(strategy, f"{directory}/blocked", right_state(dist.get_rank()))
        assert attempt.error == WriteFailedError.__name__
    return save_with_addition(strategy, f"{directory}/after")


def added_to_stock_on_rank(directory: str) -> dict[str, Any]:
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), do_cache_distribution=True)
    with CpuEmulation(megatron=False):
        save(strategy, f"{directory}/before", right_state(dist.get_rank()))
        return save_with_addition(strategy, f"{directory}/after")


def save_with_addition(strategy: Any, directory: str) -> dict[str, Any]:
    state = right_state(dist.get_rank())
    replicated_tensor_added(state, dist.get_rank())
    kept = values(state)
    save(strategy, directory, state)
    return kept


@pytest.mark.parametrize("blocked", [False, True], ids=["rebuilt", "together"])
def test_a_tensor_added_behind_a_cached_distribution_is_saved(ranks: RankPool, tmp_path: Path, blocked: bool) -> None:
    held = ranks.run(added_on_rank, str(tmp_path), blocked)

    assert all("added@[0, 0]" in each for each in held)
    assert_holds(tmp_path / "after", held)


def test_stock_megatron_loses_a_tensor_added_behind_a_cached_distribution(ranks: RankPool, tmp_path: Path) -> None:
    """What the test above is about; fails when Megatron mends it."""
    held = ranks.run(added_to_stock_on_rank, str(tmp_path))

    lost = {key for each in held for key in each} - checkpoint_values(str(tmp_path / "after")).keys()
    assert lost == {"added@[0, 0]"}


# The prepared file: rewritten where we may, as the tests above see, and never touched elsewhere.


def in_a_checkpoint(file: Path) -> Path:
    return Path(shutil.copy(file, file.parent / "created" / "prepared.metadata"))


def a_checkpoints_own(file: Path) -> Path:
    return file.parent / "created" / ".metadata"


def a_plain_one(file: Path) -> Path:
    return Path(shutil.copy(file.parent / "created" / ".metadata", file.parent / "plain.metadata"))


def read_only(file: Path) -> Path:
    file.chmod(0o444)
    return file


UNTOUCHED = {
    in_a_checkpoint: "it belongs to a checkpoint",
    a_checkpoints_own: "it belongs to a checkpoint",
    a_plain_one: "it is not one that --ckpt-metadata-create made",
    read_only: "it is read-only",
}


def create_on_rank(directory: str) -> str:
    return created_on_rank(Job(directory=directory), directory)


def drift_on_rank(job: Job) -> Series:
    return series(job, job.directory, changed("resized"), changed("resized"))


def look_at(file: Path) -> tuple[bytes, int, int, int]:
    found = file.stat()
    return file.read_bytes(), found.st_ino, found.st_mtime_ns, found.st_mode


@pytest.mark.parametrize(("place", "reason"), UNTOUCHED.items(), ids=[place.__name__ for place in UNTOUCHED])
def test_a_file_that_is_not_ours_to_change_is_left_and_the_layout_is_kept_in_memory(
    ranks: RankPool, tmp_path: Path, place: Callable[[Path], Path], reason: str
) -> None:
    file = place(Path(ranks.run(create_on_rank, str(tmp_path))[0]))
    before = look_at(file)

    seen = ranks.run(drift_on_rank, Job(directory=str(tmp_path), reuse=str(file)))

    assert look_at(file) == before
    assert [each.how for each in seen] == [[REBUILT, REUSED]] * 2
    for number in (0, 1):
        assert_holds(tmp_path / str(number + 1), [each.saves[number].changed for each in seen])
    about_the_file = [warning for warning in seen[0].warnings if str(file) in warning]
    assert len(about_the_file) == 1
    assert f"{file} does not have the current layout, {reason}." in about_the_file[0]
    assert len(seen[0].warnings) == 2  # and that the layout changed
    assert seen[1].warnings == []
    assert not any(each.file_is_current for each in seen)
