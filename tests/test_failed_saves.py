"""Saves that fail or are asked for wrongly: the same error on every rank, nothing published, the next one works.

Files are made unwritable by directories in their places, which stops root as well.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from ranks import RankPool
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from workload import BESIDE, Job, StateDict, assert_holds, heard, save, save_series_on_rank, state, values

from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.commit.commit import OnDrift
from megatron_ckpt_ext.commit.failures import MetadataReuseError, SaveFailedError, WriteFailedError
from megatron_ckpt_ext.commit.finalize import save_state_dict_async_finalize
from megatron_ckpt_ext.compat.mcore import save_planner, to_pyt_state_dict
from megatron_ckpt_ext.compat.nvrx import AsyncRequest, FileSystemWriterAsync
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.layout import Slice
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.async_plan import PlanResult, save_state_dict_async_plan
from megatron_ckpt_ext.plan.held import held_in_sharded_state_dict
from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy
from megatron_ckpt_ext.write.nothing import write_nothing

type Fault = Callable[[Path, StateDict], None]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What one rank saw: plain data."""

    error: str
    text: str
    causes: dict[int, str]
    is_checkpoint_exception: bool
    is_exception: bool


def block(path: Path) -> None:
    """Put a directory where a file is to be written."""
    (path / "in the way").mkdir(parents=True, exist_ok=True)


def data_file_blocked(directory: Path, state_dict: StateDict) -> None:
    if dist.get_rank() == 1:
        block(directory / "__1_0.distcp")


def data_file_blocked_and_drift_before_it(directory: Path, state_dict: StateDict) -> None:
    data_file_blocked(directory, state_dict)
    if dist.get_rank() == 0:
        state_dict["added"] = ShardedObject("added", "of rank 0", (1,), (0,))


def metadata_blocked(directory: Path, state_dict: StateDict) -> None:
    if dist.get_rank() == 0:
        block(directory / ".metadata")


FAULTS = {
    fault.__name__: fault for fault in (data_file_blocked, data_file_blocked_and_drift_before_it, metadata_blocked)
}


def fail_then_save_on_rank(job: Job, fault: str) -> Failure:
    """Try a save with a fault into ``bad``, then save into ``good`` with the same strategy."""
    strategy = job.strategy()
    bad = Path(job.directory) / "bad"
    broken = state(1)
    bad.mkdir(exist_ok=True)
    FAULTS[fault](bad, broken)
    failure = failure_of(lambda: save(strategy, str(bad), broken))
    save(strategy, str(Path(job.directory) / "good"), state(2))
    return failure


def failure_of(attempt: Callable[[], object]) -> Failure:
    try:
        attempt()
    except SaveFailedError as error:
        return Failure(
            error=type(error).__name__,
            text=str(error),
            causes=error.causes,
            is_checkpoint_exception=isinstance(error, CheckpointException),
            is_exception=isinstance(error, Exception),
        )
    raise AssertionError("the save went through")


def created(ranks: RankPool, directory: Path, **how: Any) -> Job:
    """Create a prepared file on two ranks; return the job that reuses it."""
    job = Job(directory=str(directory), create=str(directory / "prepared.metadata"), **how)
    ranks.run(save_series_on_rank, job, [0])
    return replace(job, create=None, reuse=job.create)


def the_failure(failures: list[Failure]) -> Failure:
    """All ranks must have seen the same one, as an ordinary exception and as torch's."""
    assert [failure for failure in failures if failure != failures[0]] == []
    assert failures[0].is_checkpoint_exception
    assert failures[0].is_exception
    return failures[0]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fault", ["data_file_blocked", "data_file_blocked_and_drift_before_it"])
def test_a_rank_that_cannot_write_fails_the_reuse_on_all(
    ranks: RankPool, tmp_path: Path, fault: str, workers: int
) -> None:
    job = created(ranks, tmp_path, workers=workers)

    failure = the_failure(ranks.run(fail_then_save_on_rank, job, fault))

    assert failure.error == WriteFailedError.__name__
    assert list(failure.causes) == [1]
    assert failure.text.startswith("checkpoint save failed (write), nothing was published. rank 1: ")
    assert "__1_0.distcp" in failure.text
    assert published(tmp_path / "bad") == []
    assert published(tmp_path / "good") == [".metadata", "metadata.json"]


def test_a_rank_that_cannot_write_fails_the_create_on_all(ranks: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "prepared.metadata"

    failures = ranks.run(fail_then_save_on_rank, Job(directory=str(tmp_path), create=str(file)), "data_file_blocked")

    failure = the_failure(failures)
    assert failure.error == WriteFailedError.__name__
    assert list(failure.causes) == [1]
    assert published(tmp_path / "bad") == []
    assert published(tmp_path / "good") == [".metadata", "metadata.json"]
    assert [PreparedMetadata.load(str(file), rank, 2).slice.rank for rank in (0, 1)] == [0, 1]


def test_a_metadata_that_cannot_be_published_fails_the_create_on_all(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(directory=str(tmp_path), create=str(tmp_path / "prepared.metadata"))

    failure = the_failure(ranks.run(fail_then_save_on_rank, job, "metadata_blocked"))

    assert failure.error == WriteFailedError.__name__
    assert list(failure.causes) == [0]
    assert published(tmp_path / "bad") == [".metadata"]  # the directory in the way
    assert published(tmp_path / "good") == [".metadata", "metadata.json"]


def published(directory: Path) -> list[str]:
    """Everything but data files."""
    return sorted({path.name for path in directory.iterdir() if path.suffix != ".distcp"} - BESIDE)


def lose_directory_on_rank(job: Job) -> Failure:
    """The directory goes away between the write and the end of the save, so the coordinator cannot stage."""
    directory = Path(job.directory) / "bad"
    strategy = job.strategy()
    directory.mkdir(exist_ok=True)
    dist.barrier()
    request = dist_checkpointing.save(state(1), str(directory), strategy, async_sharded_save=True)
    write(request)
    dist.barrier()
    shutil.rmtree(directory, ignore_errors=True)
    dist.barrier()
    failure = failure_of(request.finalize_fns[0])
    save(strategy, str(Path(job.directory) / "good"), state(2))
    return failure


def write(request: AsyncRequest) -> None:
    """Run the background part of a request in this process."""
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[1] = request.preload_fn()
    request.async_fn(*arguments)


def test_a_coordinator_that_cannot_stage_votes_failed(ranks: RankPool, tmp_path: Path) -> None:
    failure = the_failure(ranks.run(lose_directory_on_rank, created(ranks, tmp_path)))

    assert failure.error == WriteFailedError.__name__
    assert list(failure.causes) == [0]
    assert str(tmp_path / "bad" / "metadata.json") in failure.text
    assert not (tmp_path / "bad").exists()
    assert published(tmp_path / "good") == [".metadata", "metadata.json"]


def without_body_on_rank(job: Job) -> tuple[Any, list[str]]:
    """A layout that was loaded for another coordinator: the coordinator lacks the bytes to publish."""
    rank, world = dist.get_rank(), dist.get_world_size()
    strategy = job.strategy()
    strategy.prepared = PreparedMetadata.load(str(job.reuse), rank, world, coordinator=1)
    state_dict = state(1)
    held = values(state_dict)
    with heard() as warnings:
        save(strategy, str(Path(job.directory) / "saved"), state_dict)
    return held, warnings


def test_a_coordinator_without_the_layout_makes_it_anew(ranks: RankPool, tmp_path: Path) -> None:
    (held, warnings), (other, _) = ranks.run(without_body_on_rank, created(ranks, tmp_path), timeout=20)

    assert_holds(tmp_path / "saved", [held, other])
    assert "rank 0: this rank has no bytes of the layout" in warnings[0]


def overwrite_on_rank(job: Job) -> Failure:
    """A complete checkpoint is overwritten by a save that drifts."""
    strategy = replace(job, extra={"on_drift": OnDrift.FAIL}).strategy()
    directory = str(Path(job.directory) / "again")
    save(strategy, directory, state(1))
    changed = state(2)
    del changed["moment"]
    return failure_of(lambda: save(strategy, directory, changed))


def test_a_refused_save_leaves_no_older_metadata_over_its_bytes(ranks: RankPool, tmp_path: Path) -> None:
    failure = the_failure(ranks.run(overwrite_on_rank, created(ranks, tmp_path)))

    assert failure.error == MetadataReuseError.__name__
    assert ".metadata" not in published(tmp_path / "again")


def empty_rank_on_rank(job: Job) -> tuple[bool, int]:
    """A rank with nothing to write must still send a function: NVRx never queues a request without one."""
    strategy = job.strategy()
    whole = {"settings": ShardedObject("settings", {"lr": 0.25}, (1,), (0,))} if dist.get_rank() == 0 else {}
    Path(job.directory, "step").mkdir(exist_ok=True)
    dist.barrier()
    request = strategy.async_save(whole, f"{job.directory}/step")
    write(request)
    dist.barrier()
    request.finalize_fns[0]()
    return request.async_fn is write_nothing, len(strategy.prepared.slice.locators)


def test_a_rank_with_nothing_to_write_takes_part(ranks: RankPool, tmp_path: Path) -> None:
    (first_idle, first_items), (idle, items) = ranks.run(
        empty_rank_on_rank, Job(directory=str(tmp_path), create=str(tmp_path / "prepared.metadata"))
    )

    assert not first_idle
    assert first_items > 0
    assert idle
    assert items == 0


def planned(directory: str, state_dict: StateDict, reuse: Any = None) -> PlanResult:
    Path(directory).mkdir(exist_ok=True)
    dist.barrier()
    return save_state_dict_async_plan(
        to_pyt_state_dict(state_dict, keep_only_main_replica=True),
        FileSystemWriterAsync(directory, thread_count=1),
        planner=save_planner(keep_only_main_replica=True),
        reuse_metadata_obj=reuse,
        held_items=held_in_sharded_state_dict(state_dict),
    )


def through_functions(directory: str, state_dict: StateDict, **how: Any) -> PreparedMetadata:
    """Save through the public functions, without a strategy."""
    result = planned(directory, state_dict, how.get("reuse_metadata_obj"))
    function, preload, arguments = result.storage_writer.get_save_function_and_args()
    arguments[1] = preload()
    function(*arguments)
    return save_state_dict_async_finalize(*result, **how)


def reuse_in_memory_on_rank(directory: str) -> tuple[list[PreparedMetadata], Failure]:
    """Create through the functions, reuse the published ``Metadata`` as it is in memory, then drift from it twice."""
    file = f"{directory}/prepared.metadata"
    made = through_functions(f"{directory}/created", state(1), create_metadata_path=file)
    dist.barrier()
    plain = FileSystemReader(f"{directory}/created").read_metadata()
    followed = through_functions(f"{directory}/reused", state(2), reuse_metadata_obj=plain)
    failure = failure_of(
        lambda: through_functions(f"{directory}/bad", added(3), reuse_metadata_obj=plain, on_drift=OnDrift.FAIL)
    )
    rebuilt = through_functions(f"{directory}/rebuilt", added(4), reuse_metadata_obj=plain)
    again = through_functions(f"{directory}/again", added(5), reuse_metadata_obj=rebuilt, on_drift=OnDrift.FAIL)
    old = through_functions(f"{directory}/good", state(6), reuse_metadata_obj=made)
    return [made, followed, rebuilt, again, old], failure


def added(seed: int) -> StateDict:
    changed = state(seed)
    changed["added"] = replace(changed["settings"], key="added")
    return changed


def test_a_plain_metadata_in_memory_is_reused_through_the_functions(ranks: RankPool, tmp_path: Path) -> None:
    seen = ranks.run(reuse_in_memory_on_rank, str(tmp_path))

    for rank, ((made, followed, rebuilt, again, old), _) in enumerate(seen):
        assert [each.slice.rank for each in (made, followed, rebuilt)] == [rank] * 3
        assert [each.body is not None for each in (made, followed, rebuilt)] == [rank == 0] * 3
        assert again == rebuilt
        assert old == made
    failure = the_failure([failure for _, failure in seen])
    assert failure.error == MetadataReuseError.__name__
    assert failure.causes == {0: "added/shard_0_1 does not match the prepared metadata: prepared nothing, found object"}
    assert published(tmp_path / "bad") == []
    names = ("created", "reused", "good", "rebuilt", "again")
    layouts = {name: FileSystemReader(tmp_path / name).read_metadata() for name in names}
    assert layouts["created"].storage_data == layouts["reused"].storage_data == layouts["good"].storage_data
    assert layouts["rebuilt"].storage_data == layouts["again"].storage_data
    more = layouts["rebuilt"].state_dict_metadata.keys() - layouts["created"].state_dict_metadata.keys()
    assert more == {"added/shard_0_1"}


def misuse_on_rank(directory: str) -> list[str]:
    """Calls of finalize that do not fit the plan: each must fail before anybody communicates."""
    alone = planned(f"{directory}/alone", state(1))
    file = f"{directory}/prepared.metadata"
    made = through_functions(f"{directory}/created", state(1), create_metadata_path=file)
    attempts: list[dict[str, Any]] = [
        {"reuse_metadata_obj": made, "create_metadata_path": file},
        {"reuse_metadata_obj": made},
    ]
    with CollectiveCounter() as counter:
        messages = [message_of(alone, **how) for how in attempts]
    assert counter.totals() == {}
    return messages


def message_of(result: PlanResult, **how: Any) -> str:
    try:
        save_state_dict_async_finalize(*result, **how)
    except ValueError as error:
        return str(error)
    return "no error"


def test_finalizing_what_was_not_planned_is_a_value_error_everywhere(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(misuse_on_rank, str(tmp_path), timeout=20)

    assert first == second
    both, unplanned = first
    assert "both given" in both
    assert "not to save_state_dict_async_plan" in unplanned


def test_a_strategy_reuses_or_creates() -> None:
    own = Slice(rank=0, locators={}, held={})
    prepared = PreparedMetadata(fingerprint=Fingerprint(), slice=own)

    with pytest.raises(ValueError, match="not both"):
        PreparedSaveStrategy(prepared_metadata=prepared, ckpt_metadata_create_path="file")
