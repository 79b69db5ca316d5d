"""Exactly the expected collectives in each part of a save, counted by kind on every rank."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from ranks import RankPool
from workload import StateDict, state

from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.commit.commit import OnDrift
from megatron_ckpt_ext.commit.failures import SaveFailedError
from megatron_ckpt_ext.integrations.dist_checkpointing import DistCheckpointing
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.strategy.fully_parallel import PreparedSaveWrapper
from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

type Counts = dict[str, dict[str, int]]

STRATEGY, SAVE, FINALIZE, MEGATRON = "strategy", "save", "finalize", "megatron"
"""Phases: our strategy's call, the rest of ``dist_checkpointing.save``, our finalizer, Megatron's finalizer."""

MEGATRONS: Counts = {MEGATRON: {"barrier": 1}}
TOGETHER: Counts = {
    FINALIZE: {"all_reduce": 1, "gather_object": 1, "broadcast_object_list": 1, "all_gather_object": 1},
    **MEGATRONS,
}
"""The vote; plans, results and sections; the answer; who sees the prepared file."""
REUSED: Counts = {FINALIZE: {"all_reduce": 1}, **MEGATRONS}
STOPPED: Counts = {FINALIZE: {"all_reduce": 1, "broadcast_object_list": 1}}
"""The vote, and the cause."""
LOST: Counts = {FINALIZE: {"all_reduce": 1, "gather_object": 1, "broadcast_object_list": 1}}
"""Drift that turns out to be a loss when plans and results are together."""
SAVES = {
    "create": TOGETHER,
    "after_create": REUSED,
    "reuse": REUSED,
    "reuse_again": REUSED,
    "rebuild": TOGETHER,
    "after_rebuild": REUSED,
    "failed": STOPPED,
    "after_failed": TOGETHER,
    "refused": STOPPED,
    "after_refused": REUSED,
}
"""In this order."""
FOLLOW_NO_LAYOUT = ("create", "after_failed")


class CountedStrategy(PreparedSaveStrategy):
    """The strategy, with its call counted apart from what Megatron does around it."""

    counter: CollectiveCounter

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.wrapper = PreparedSaveWrapper(self)

    def async_save(self, *args: Any, **kwargs: Any) -> Any:
        with self.counter.phase(STRATEGY):
            return super().async_save(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Around:
    """What Megatron does around our strategy."""

    wrapped: bool = False
    """Whether replicas are distributed."""
    validate: bool = False
    """Whether Megatron validates each save."""
    installed: bool = False
    """Whether it is the ``save`` of a Megatron in which the package is installed."""


def counted(strategy: CountedStrategy, around: Around, directory: Path, state_dict: StateDict) -> Counts:
    """Save once; return the collectives by phase. A phase without any is left out."""
    directory.mkdir(exist_ok=True)
    dist.barrier()
    module: Any = DistCheckpointing(dist_checkpointing) if around.installed else dist_checkpointing
    with CollectiveCounter() as strategy.counter:
        with strategy.counter.phase(SAVE):
            request = module.save(
                state_dict,
                str(directory),
                strategy.wrapper if around.wrapped else strategy,
                async_sharded_save=True,
                validate_access_integrity=around.validate,
            )
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:  # a plan that failed writes nothing
            arguments[1] = request.preload_fn()
        request.async_fn(*arguments)
        with contextlib.suppress(SaveFailedError):
            for phase, finalize in zip((FINALIZE, MEGATRON), request.finalize_fns, strict=True):
                with strategy.counter.phase(phase):
                    finalize()
        return strategy.counter.totals()


def with_object(number: int) -> StateDict:
    state_dict = state(number)
    state_dict["added"] = ShardedObject("added", "", (1,), (0,), replica_id=dist.get_rank())
    return state_dict


def count_on_rank(directory: str, around: Around) -> dict[str, Counts]:
    """Count every kind of save, in the order of ``SAVES``."""
    file = f"{directory}/prepared.metadata"
    found: dict[str, Counts] = {}

    def count(strategy: CountedStrategy, name: str, state_dict: StateDict) -> None:
        found[name] = counted(strategy, around, Path(directory, name), state_dict)

    creating = CountedStrategy(ckpt_metadata_create_path=file)
    count(creating, "create", state(1))
    count(creating, "after_create", state(2))
    prepared = PreparedMetadata.load(file, dist.get_rank(), dist.get_world_size())
    as_created = prepared.in_memory() if dist.get_rank() == 0 else prepared  # the rebuild rewrites the file
    reusing = CountedStrategy(prepared_metadata=prepared)
    count(reusing, "reuse", state(1))
    count(reusing, "reuse_again", state(2))
    count(reusing, "rebuild", with_object(3))
    count(reusing, "after_rebuild", with_object(4))
    Path(directory, "failed", f"__{dist.get_rank()}_0.distcp", "in the way").mkdir(parents=True)
    count(reusing, "failed", with_object(5))
    count(reusing, "after_failed", with_object(6))
    refusing = CountedStrategy(prepared_metadata=as_created, on_drift=OnDrift.FAIL)
    count(refusing, "refused", with_object(7))
    count(refusing, "after_refused", state(8))
    return found


def the_counts(ranks: RankPool, directory: Path, world_size: int, around: Around) -> dict[str, Counts]:
    first, *others = ranks.run(count_on_rank, str(directory), around, world_size=world_size)
    assert [each for each in others if each != first] == []
    assert list(first) == list(SAVES)
    return first


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_validation_and_no_wrapper(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    assert the_counts(ranks, tmp_path, world_size, Around()) == SAVES


VALIDATION = {"all_gather_object": 1, "broadcast_object_list": 1}
DISTRIBUTION = {"all_gather_object": 2}
"""Megatron's exchange of who holds what, and its validation of the outcome."""
BOTH = {"all_gather_object": 3, "broadcast_object_list": 1}


@pytest.mark.parametrize("world_size", [2, 4])
def test_megatron_validates_around_us_and_distributes_only_without_a_layout(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    found = the_counts(ranks, tmp_path, world_size, Around(wrapped=True, validate=True))

    around = {name: counts.pop(SAVE) for name, counts in found.items()}
    assert found == SAVES
    assert around == {name: BOTH if name in FOLLOW_NO_LAYOUT else VALIDATION for name in SAVES}


def test_distribution_alone_costs_nothing_with_a_layout(ranks: RankPool, tmp_path: Path) -> None:
    found = the_counts(ranks, tmp_path, 2, Around(wrapped=True))

    around = {name: counts.pop(SAVE, {}) for name, counts in found.items()}
    assert found == SAVES
    assert around == {name: DISTRIBUTION if name in FOLLOW_NO_LAYOUT else {} for name in SAVES}


def test_an_installed_save_validates_only_without_a_layout(ranks: RankPool, tmp_path: Path) -> None:
    found = the_counts(ranks, tmp_path, 2, Around(wrapped=True, validate=True, installed=True))

    around = {name: counts.pop(SAVE, {}) for name, counts in found.items()}
    assert found == SAVES
    assert around == {name: BOTH if name in FOLLOW_NO_LAYOUT else {} for name in SAVES}


def lose_on_rank(directory: str) -> Counts:
    """The rank that writes a replica does not hold it any more; the other one holds it and does not write it."""
    around = Around(wrapped=True)
    strategy = CountedStrategy(ckpt_metadata_create_path=f"{directory}/prepared.metadata")
    counted(strategy, around, Path(directory, "create"), state(1))
    state_dict = state(2)
    if dist.get_rank() == 1:
        del state_dict["model"]["bias"], state_dict["model"]["norm"]
    return counted(strategy, around, Path(directory, "lost"), state_dict)


def test_what_nobody_wrote_is_found_in_the_exchange_of_the_rebuild(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(lose_on_rank, str(tmp_path)) == [LOST, LOST]
