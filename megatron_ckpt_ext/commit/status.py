"""The one small MIN all_reduce of a save: did every rank write, and write what the metadata says?"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Outcome", "SaveStatus", "Verdict", "agree", "reduce_min", "share_cause"]


class SaveStatus(IntEnum):
    """State of a save on one rank; the smallest of all ranks decides, but no pending rank hides a failed one."""

    PENDING = 0
    """The rank is not done."""
    FAILED = 1
    """The rank could not write."""
    DRIFT = 2
    """The rank wrote or holds something else than the prepared metadata says, or there is none."""
    READY = 3
    """The rank wrote what the prepared metadata says."""


_BAD = (SaveStatus.FAILED, SaveStatus.DRIFT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank votes."""

    status: SaveStatus
    """Its status."""
    cause: str = ""
    """Why it is not ready, one sentence."""
    digest: int = 0
    """Of what must be equal on all ranks, below 2**62; looked at once nobody is pending."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks know after the reduction."""

    status: SaveStatus
    """``FAILED`` if any rank failed, else the smallest status."""
    rank: int | None
    """Lowest rank, in the group, that failed or drifted; ``None`` if the save is pending or ready."""
    alike: bool = True
    """Whether the digests of all ranks are equal."""


def reduce_min(values: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """Return the element-wise minimum over the ranks of ``group``. Called on all ranks: one all_reduce.

    Args:
        values: int64 values, the same number on every rank.
        group: ``None`` is the default group.
    """
    vector = torch.tensor(list(values), dtype=torch.int64, device=_reduction_device(group))
    dist.all_reduce(vector, op=dist.ReduceOp.MIN, group=group)
    return [int(value) for value in vector.tolist()]


def agree(outcome: Outcome, wrapper: Any, *, call: int = 0) -> Verdict:
    """Vote. Called on all ranks: one MIN all_reduce of seven int64.

    The vector is the status, the number of the call and its negative, for each bad status the lowest rank that has it,
    the digest and its negative.

    Args:
        outcome: of this rank.
        wrapper: torch's ``_DistWrapper`` of the save.
        call: number of the save, equal on all ranks.

    Raises:
        RuntimeError: on every rank: the ranks vote on different saves.
    """
    nobody = wrapper.get_world_size()
    ranks = [wrapper.rank if outcome.status == status else nobody for status in _BAD]
    vector = [int(outcome.status), call, -call, *ranks, outcome.digest, -outcome.digest]
    reduced = reduce_min(vector, wrapper.group) if wrapper.use_dist else vector
    lowest, first, last, failed_rank, drifted_rank, low_digest, high_digest = reduced
    if first != -last:
        raise RuntimeError(
            f"ranks vote on different checkpoint saves, numbers {first} to {-last}: every rank must schedule the same "
            "saves and finalize them in the same order"
        )
    if failed_rank < nobody:
        return Verdict(SaveStatus.FAILED, failed_rank)
    status = SaveStatus(lowest)
    alike = status is SaveStatus.PENDING or low_digest == -high_digest
    return Verdict(status, drifted_rank if status is SaveStatus.DRIFT else None, alike)


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
