"""The one small MIN all_reduce that ends a save: did every rank write, and write what the metadata says?"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Outcome", "SaveStatus", "Verdict", "agree", "reduce_min", "share_cause"]


class SaveStatus(IntEnum):
    """State of a save on one rank; the smallest of all ranks decides."""

    FAILED = 1
    """The rank could not write."""
    DRIFT = 2
    """The rank wrote or holds something else than the prepared metadata says."""
    READY = 3
    """The rank wrote what the prepared metadata says."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank votes."""

    status: SaveStatus
    """Its status."""
    cause: str = ""
    """Why it is not ready, one sentence."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks know after the reduction."""

    status: SaveStatus
    """The smallest status."""
    rank: int | None
    """Lowest rank with that status, in the group; ``None`` if all are ready."""


def reduce_min(values: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """Return the element-wise minimum over the ranks of ``group``. Called on all ranks: one all_reduce.

    Args:
        values: int64 values, the same number on every rank.
        group: ``None`` is the default group.
    """
    vector = torch.tensor(list(values), dtype=torch.int64, device=_reduction_device(group))
    dist.all_reduce(vector, op=dist.ReduceOp.MIN, group=group)
    return [int(value) for value in vector.tolist()]


def agree(outcome: Outcome, wrapper: Any) -> Verdict:
    """Vote. Called on all ranks: one MIN all_reduce of three int64.

    The vector carries for each bad status the lowest rank that has it, so a failed rank is not hidden behind a
    lower rank that drifted.

    Args:
        outcome: of this rank.
        wrapper: torch's ``_DistWrapper`` of the save.
    """
    nobody = wrapper.get_world_size()
    bad = (SaveStatus.FAILED, SaveStatus.DRIFT)
    ranks = [wrapper.rank if outcome.status == status else nobody for status in bad]
    vector = [int(outcome.status), *ranks]
    lowest, *first_ranks = reduce_min(vector, wrapper.group) if wrapper.use_dist else vector
    status = SaveStatus(lowest)
    return Verdict(status, None if status is SaveStatus.READY else first_ranks[bad.index(status)])


def share_cause(verdict: Verdict, outcome: Outcome, wrapper: Any) -> dict[int, str]:
    """Tell every rank why the save is bad. Called on all ranks, after a bad verdict only: one broadcast.

    Returns:
        The rank of ``verdict`` and its cause, as plain data.
    """
    rank = verdict.rank or 0
    causes: list[str | None] = [outcome.cause]
    if wrapper.use_dist:
        source = rank if wrapper.group is None else dist.get_global_rank(wrapper.group, rank)
        dist.broadcast_object_list(causes, src=source, group=wrapper.group)
    return {rank: str(causes[0])}


def _reduction_device(group: dist.ProcessGroup | None) -> torch.device:
    if "gloo" in str(dist.get_backend(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
