"""Exactly the expected collectives in each part of a save, counted by kind on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from ranks import RankPool
from workload import StateDict, state

from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.commit.failures import MetadataReuseError
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

type Counts = dict[str, dict[str, int]]

STRATEGY, SAVE, FINALIZE, MEGATRON = "strategy", "save", "finalize", "megatron"
"""Phases: our strategy's call, the rest of ``dist_checkpointing.save``, our finalizer, Megatron's finalizer."""

CREATED: Counts = {
    STRATEGY: {"gather_object": 1},
    FINALIZE: {"gather_object": 1, "broadcast_object_list": 1, "all_gather_object": 1},
    MEGATRON: {"barrier": 1},
}
REUSED: Counts = {FINALIZE: {"all_reduce": 1}, MEGATRON: {"barrier": 1}}
REFUSED: Counts = {FINALIZE: {"all_reduce": 1, "broadcast_object_list": 1}}


class CountedStrategy(PreparedSaveStrategy):
    """The strategy, with its call counted apart from what Megatron does around it."""

    counter: CollectiveCounter

    def async_save(self, *args: Any, **kwargs: Any) -> Any:
        with self.counter.phase(STRATEGY):
            return super().async_save(*args, **kwargs)


def counted(strategy: Any, base: CountedStrategy, directory: Path, state_dict: StateDict, *, validate: bool) -> Counts:
    """Save once; return the collectives by phase. A phase without any is left out."""
    directory.mkdir(exist_ok=True)
    dist.barrier()
    with CollectiveCounter() as base.counter:
        with base.counter.phase(SAVE):
            request = dist_checkpointing.save(
                state_dict,
                str(directory),
                strategy,
                async_sharded_save=True,
                validate_access_integrity=validate,
            )
        arguments = list(request.async_fn_args)
        arguments[1] = request.preload_fn()
        request.async_fn(*arguments)
        try:
            for phase, finalize in zip((FINALIZE, MEGATRON), request.finalize_fns, strict=True):
                with base.counter.phase(phase):
                    finalize()
        except MetadataReuseError:
            pass
        return base.counter.totals()


def count_on_rank(directory: str, fully_parallel: bool, validate: bool) -> dict[str, Counts]:
    """Count a save that creates, the next one of that job, one of a later job, and one that is refused."""
    file = f"{directory}/prepared.metadata"
    creating = CountedStrategy(ckpt_metadata_create_path=file)
    wrapped = FullyParallelSaveStrategyWrapper(creating) if fully_parallel else creating
    found = {}
    for number, name in enumerate(["create", "after_create"]):
        found[name] = counted(wrapped, creating, Path(directory, name), state(number), validate=validate)
    prepared = PreparedMetadata.load(file, dist.get_rank(), dist.get_world_size())
    reusing = CountedStrategy(prepared_metadata=prepared)
    wrapped = FullyParallelSaveStrategyWrapper(reusing, do_cache_distribution=True) if fully_parallel else reusing
    for number, name in enumerate(["reuse", "reuse_again"]):
        found[name] = counted(wrapped, reusing, Path(directory, name), state(number), validate=validate)
    changed = state(9)
    changed["added"] = ShardedObject("added", "", (1,), (0,), replica_id=dist.get_rank())
    found["refused"] = counted(wrapped, reusing, Path(directory, "refused"), changed, validate=validate)
    return found


def the_counts(ranks: RankPool, directory: Path, world_size: int, **how: Any) -> dict[str, Counts]:
    first, *others = ranks.run(count_on_rank, str(directory), world_size=world_size, **how)
    assert [each for each in others if each != first] == []
    return first


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_validation_and_no_wrapper(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    found = the_counts(ranks, tmp_path, world_size, fully_parallel=False, validate=False)

    assert found == {
        "create": CREATED,
        "after_create": REUSED,
        "reuse": REUSED,
        "reuse_again": REUSED,
        "refused": REFUSED,
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_megatron_validates_and_distributes_around_us(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    found = the_counts(ranks, tmp_path, world_size, fully_parallel=True, validate=True)

    around = {name: counts.pop(SAVE) for name, counts in found.items()}
    assert found == {
        "create": CREATED,
        "after_create": REUSED,
        "reuse": REUSED,
        "reuse_again": REUSED,
        "refused": REFUSED,
    }
    validation = {"all_gather_object": 1, "broadcast_object_list": 1}
    distribution = {"all_gather_object": 3, "broadcast_object_list": 1}
    assert around["create"] == around["after_create"] == around["reuse"] == distribution
    assert around["reuse_again"] == around["refused"] == validation
