"""The common state is compared by one number in the vote; a difference is named, once, without ending anything."""

from argparse import Namespace
from collections import deque
from dataclasses import replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from workload import Job, heard, save, state

from megatron_ckpt_ext.collectives import CollectiveCounter, CollectiveSums
from megatron_ckpt_ext.compat import mcore
from megatron_ckpt_ext.metadata.digest import combined_digest, digests_by_key


def saves_on_rank(directory: str, differing: bool) -> tuple[list[str], list[int], int]:
    """Create once, reuse three times with common state that may differ; warnings, object collectives, checkpoints."""
    create = Job(directory=directory, create=f"{directory}/prepared")
    save(create.strategy(), f"{directory}/created", with_common(seed=1, differing=False))
    strategy = replace(create, create=None, reuse=f"{directory}/prepared").strategy()
    objects = []
    with heard() as warnings:
        for seed in (2, 3, 4):
            strategy.preprocess_common = lambda common: {**common, "args": without_rank(common["args"])}
            with CollectiveCounter() as counter, counter.phase("save") as tally:
                state_dict = as_megatron_does(strategy, with_common(seed=seed, differing=differing))
                strategy.async_save(state_dict, made(directory, seed)).execute_sync()
            objects.append(CollectiveSums.of(tally.counts).objects)
    dist.barrier()  # rank 0 publishes after the vote, on which nobody waits
    published = sum((Path(directory) / f"step_{seed}" / ".metadata").exists() for seed in (2, 3, 4))
    return warnings, objects, published


def with_common(*, seed: int, differing: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    args = Namespace(rank=rank, lr=0.5 if differing and rank == 1 else 0.25, betas=(0.9, 0.99))
    return {**state(seed), "args": args, "iteration": seed}


def without_rank(args: Namespace) -> Namespace:
    return Namespace(**{name: value for name, value in vars(args).items() if name != "rank"})


def as_megatron_does(strategy: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Split as ``dist_checkpointing.save`` splits it; before 0.19 a strategy sees only what is sharded."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    common = {name: state_dict.pop(name) for name in ("args", "iteration")}
    if mcore.common_beside(common) is not None:
        strategy.common_beside = common
        return state_dict
    state_dict["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=dist.get_rank())
    return state_dict


def made(directory: str, seed: int) -> str:
    path = Path(directory) / f"step_{seed}"
    path.mkdir(exist_ok=True)
    dist.barrier()
    return str(path)


@pytest.mark.parametrize("differing", [False, True])
def test_a_difference_is_named_once_and_costs_no_checkpoint(ranks: RankPool, tmp_path: Path, differing: bool) -> None:
    seen = ranks.run(saves_on_rank, str(tmp_path), differing)

    assert [published for _, _, published in seen] == [3, 3]
    assert [objects for _, objects, _ in seen] == [[1 if differing else 0, 0, 0]] * 2
    if differing:
        assert seen[0][0] == [
            "The common state of the checkpoint differs between ranks, that of rank 0 is saved: "
            "rank 1 differs in args/lr."
        ]
    else:
        assert seen[0][0] == []
    assert seen[1][0] == []


def test_digests_see_content_and_nothing_else() -> None:
    one = {"args": Namespace(a=1, b=[torch.arange(3)]), "text": "x", "scheduler": {"lr": 0.1, "step": 3}}
    again = {"scheduler": {"step": 3, "lr": 0.1}, "text": "x", "args": Namespace(b=[torch.arange(3)], a=1)}

    assert digests_by_key(one) == digests_by_key(again)
    assert digests_by_key(one).keys() == {"args/a", "args/b", "text", "scheduler/lr", "scheduler/step"}
    assert 0 <= combined_digest(digests_by_key(one)) < 2**62
    shared: list[int] = [1]
    assert digests_by_key({"x": [shared, shared]}) == digests_by_key({"x": [[1], [1]]})


class Colour(Enum):
    RED = 1
    BLUE = 2


class Knot:
    """An object that points at itself."""

    def __init__(self, value: int) -> None:
        self.value, self.me, self.function = value, self, len


def test_digests_are_taken_of_whatever_arguments_hold() -> None:
    def state(value: int, colour: Colour = Colour.RED) -> dict[str, Any]:
        return {
            "args": Namespace(knot=Knot(value), colour=colour, names={"b", "a", f"{value}"}, kind=Knot, path=Path("x"))
        }

    assert digests_by_key(state(1)) == digests_by_key(state(1))
    assert digests_by_key(state(1))["args/knot"] != digests_by_key(state(2))["args/knot"]
    assert digests_by_key(state(1))["args/names"] != digests_by_key(state(2))["args/names"]
    assert digests_by_key(state(1))["args/colour"] != digests_by_key(state(1, Colour.BLUE))["args/colour"]
    digests_by_key({"sparse": torch.eye(3).to_sparse()})


@pytest.mark.parametrize(
    "other",
    [
        {"args": Namespace(a=2)},
        {"args": Namespace(a=True)},
        {"args": Namespace(a="1")},
        {"args": Namespace(a=[1])},
        {"args": Namespace(a=torch.tensor(1))},
        {"args": Namespace(b=1)},
        {},
        *({"args": Namespace(a=value)} for value in (torch.float32, torch.device("cpu"), Path("a"), range(3))),
        *({"args": Namespace(a=value)} for value in (numpy.int64(1), numpy.ones(1), deque([1]), datetime(2026, 1, 1))),
    ],
    ids=repr,
)
def test_digests_tell_other_content_apart(other: dict[str, Any]) -> None:
    one = {"args": Namespace(a=1)}
    assert combined_digest(digests_by_key(one)) != combined_digest(digests_by_key(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.float32, torch.bfloat16),
        (torch.device("cpu"), torch.device("meta")),
        (Path("a"), Path("b")),
        (range(3), range(4)),
        (numpy.int64(1), numpy.int64(2)),
        (numpy.ones(2), numpy.zeros(2)),
        (numpy.ones(2), numpy.ones((1, 2))),
        (deque([1]), deque([2])),
        (datetime(2026, 1, 1), datetime(2026, 1, 2)),
        (len, print),
    ],
    ids=repr,
)
def test_digests_tell_values_of_one_type_apart(one: Any, other: Any) -> None:
    first, again, second = ({"args": Namespace(a=value)} for value in (one, one, other))
    assert digests_by_key(first) == digests_by_key(again)
    assert digests_by_key(first) != digests_by_key(second)


def test_digests_do_not_see_where_an_object_lies() -> None:
    class Opaque:
        __slots__ = ()

    assert digests_by_key({"a": Opaque()}) == digests_by_key({"a": Opaque()})
