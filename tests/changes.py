"""Changes of what a job holds between two saves, and what must be said about each.

The state dict is whole on each rank, so that a change on one rank passes Megatron's own validation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from workload import StateDict, save

from megatron_ckpt_ext.commit.failures import SaveFailedError


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
class Attempt:
    """What one rank saw of one changed save, and of the right one behind it: plain data."""

    error: str
    """Qualified name; empty if the save went through."""
    text: str
    causes: dict[int, str]
    changed: dict[str, Any] = field(default_factory=dict)
    """Content of that save."""
    right: dict[str, Any] = field(default_factory=dict)
    """Content of the right save behind it."""


def attempted(strategy: Any, directory: str, state: StateDict) -> Attempt:
    """Save; an error of ours is an answer."""
    try:
        save(strategy, directory, state)
    except SaveFailedError as error:
        return Attempt(error=type(error).__name__, text=str(error), causes=error.causes)
    return Attempt(error="", text="", causes={})
