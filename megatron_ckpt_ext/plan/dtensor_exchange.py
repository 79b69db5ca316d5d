"""The one exchange of a save that follows no layout: who holds what, to who writes it and where it lies.

A gather to the coordinator and a scatter of its answers, whatever the number of tensors. What goes wrong on a rank
travels with it, so that all ranks raise.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.compat.dcp import ERRORS
from megatron_ckpt_ext.errors import CkptExtError
from megatron_ckpt_ext.metadata.layout import Item
from megatron_ckpt_ext.plan.async_plan import PlannedSave
from megatron_ckpt_ext.plan.dtensor_holdings import Entry
from megatron_ckpt_ext.plan.dtensor_offsets import offsets_of
from megatron_ckpt_ext.plan.dtensor_planner import moved

__all__ = ["Agreed", "ExchangeError", "agree_on_offsets", "agree_on_plan", "resettled"]

type Offset = tuple[int, ...]


class ExchangeError(CkptExtError):
    """The ranks could not agree on a plan; on every rank.

    Attributes:
        causes: rank -> one sentence.
    """

    def __init__(self, causes: Mapping[int, str]) -> None:
        """Keep the causes."""
        self.causes = dict(causes)
        super().__init__("; ".join(f"rank {rank}: {cause}" for rank, cause in self.causes.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """What the coordinator answers one rank."""

    offsets: Mapping[str, Offset]
    """Of its shards whose place only all ranks together know."""
    writes: frozenset[int] = frozenset()
    """Numbers of the items of its plan that it writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    plan: SavePlan
    uneven: Sequence[Entry]


def agree_on_plan(
    part: Callable[[], tuple[SavePlan, Sequence[Entry]]], create_global_plan: Callable[..., Any], wrapper: Any
) -> Agreed:
    """Decide which rank writes what. Called on all ranks: one gather_object and one scatter_object_list.

    Of several ranks with the same item, the one with the fewest bytes so far writes it, as in torch; torch's planner
    also validates that the shards of every tensor cover it and do not overlap.

    Args:
        part: makes the plan of everything this rank could write, and what it holds of tensors whose shards are uneven.
        create_global_plan: of the planner.
        wrapper: torch's ``_DistWrapper`` of the save.

    Raises:
        ExchangeError: on every rank: a rank has no plan, or the plans do not fit together.
    """

    def combine(parts: list[_Part]) -> list[Agreed]:
        offsets = _offsets(parts)
        plans = [_with_offsets(part.plan, offsets.get(rank, {})) for rank, part in enumerate(parts)]
        chosen, _ = create_global_plan(plans)
        answers = []
        for rank, (plan, final) in enumerate(zip(plans, chosen, strict=True)):
            kept = {item.index for item in final.items}
            writes = frozenset(number for number, item in enumerate(plan.items) if item.index in kept)
            answers.append(Agreed(offsets=offsets.get(rank, {}), writes=writes))
        return answers

    def own() -> _Part:
        plan, uneven = part()
        return _Part(plan=plan, uneven=uneven)

    return _exchange(own, combine, wrapper)


def agree_on_offsets(entries: Callable[[], Sequence[Entry]], wrapper: Any) -> Mapping[str, Offset]:
    """Add up the sizes of uneven shards. Called on all ranks: one gather_object and one scatter_object_list.

    Ranks may have different keys: who lacks a tensor has none of it.

    Args:
        entries: returns what this rank holds.
        wrapper: torch's ``_DistWrapper``.

    Returns:
        Key -> global offset of this rank's shard.

    Raises:
        ExchangeError: on every rank: the shards of a tensor do not make up the tensor.
    """

    def combine(parts: list[_Part]) -> list[Agreed]:
        offsets = _offsets(parts)
        return [Agreed(offsets=offsets.get(rank, {})) for rank in range(len(parts))]

    return _exchange(lambda: _Part(plan=SavePlan([]), uneven=entries()), combine, wrapper).offsets


def resettled(
    planned: PlannedSave, results: Sequence[WriteResult], offsets: Mapping[str, Offset]
) -> tuple[PlannedSave, Sequence[WriteResult]]:
    """Return plan and results of a save whose shards turned out to lie elsewhere than this rank thought."""
    plan = _with_offsets(planned.local_plan, offsets)
    held = {_at(item, offsets): text for item, text in planned.held.items()}
    at_their_place = [
        replace(result, index=MetadataIndex(result.index.fqn, offsets[result.index.fqn]))
        if result.index.fqn in offsets
        else result
        for result in results
    ]
    return replace(planned, local_plan=plan, held=held), at_their_place


def _exchange(own: Callable[[], _Part], combine: Callable[[list[_Part]], list[Agreed]], wrapper: Any) -> Agreed:
    try:
        sent: bytes | str = pickle.dumps(own())
    except ERRORS as error:  # the peers are on their way to the gather
        sent = f"planning failed: {type(error).__name__}: {error}"
    gathered = wrapper.gather_object(sent)
    answers: list[Agreed | dict[int, str]] | None = None
    if gathered is not None:
        answers = _answers(gathered, combine, coordinator=wrapper.rank)
    answer: Agreed | dict[int, str] = wrapper.scatter_object(answers)
    if isinstance(answer, dict):
        raise ExchangeError(answer)
    return answer


def _answers(
    gathered: list[bytes | str], combine: Callable[[list[_Part]], list[Agreed]], *, coordinator: int
) -> list[Agreed | dict[int, str]]:
    causes = {rank: part for rank, part in enumerate(gathered) if isinstance(part, str)}
    if not causes:
        try:
            return [*combine([pickle.loads(part) for part in gathered if isinstance(part, bytes)])]
        except ERRORS as error:  # the peers wait for the answer
            causes = {coordinator: f"the plans do not fit together: {error}"}
    return [causes for _ in gathered]


def _offsets(parts: list[_Part]) -> dict[int, dict[str, Offset]]:
    return offsets_of((rank, entry) for rank, part in enumerate(parts) for entry in part.uneven)


def _with_offsets(plan: SavePlan, offsets: Mapping[str, Offset]) -> SavePlan:
    items = [moved(item, offsets[item.index.fqn]) if item.index.fqn in offsets else item for item in plan.items]
    return replace(plan, items=items)


def _at(item: Item, offsets: Mapping[str, Offset]) -> Item:
    return Item(item.fqn, offsets.get(item.fqn, item.offset))
