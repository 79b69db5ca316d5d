"""Planning a save of DTensors: alone where there is a layout to follow, else with one exchange."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from megatron_ckpt_ext.compat.dtensor import DTensor, by_spec, chunk_of_megatron
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.metadata.guard import Drift
from megatron_ckpt_ext.metadata.layout import Item
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.async_plan import PlannedSave
from megatron_ckpt_ext.plan.dtensor_exchange import Agreed, agree_on_plan
from megatron_ckpt_ext.plan.dtensor_holdings import DtensorHoldings, Entry, description
from megatron_ckpt_ext.plan.dtensor_optimizer import refuse_plain_optimizer_state
from megatron_ckpt_ext.plan.dtensor_planner import DtensorSavePlanner, Placed
from megatron_ckpt_ext.publish.clean import clear_for_save

__all__ = ["KnownPlan", "plan_dtensors"]

type Offset = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownPlan:
    """A plan, and what it was made of: an equal one comes of the same."""

    holdings: DtensorHoldings
    prepared: PreparedMetadata
    local_plan: SavePlan
    held: Mapping[Item, str]
    drift: Drift | None


def plan_dtensors(
    state_dict: Callable[[], Mapping[str, Any]],
    wrapper: Any,
    *,
    directory: str,
    prepared: PreparedMetadata | None,
    uneven: bool,
    known: KnownPlan | None = None,
) -> tuple[PlannedSave, KnownPlan | None]:
    """Plan a save; nothing is written or resolved yet.

    Called on all ranks. With a layout: no collectives; a rank that does not match plans as usual and reports drift.
    Without: one gather_object and one scatter_object_list. What an earlier attempt left in the directory is removed,
    its ``.metadata`` first.

    Args:
        state_dict: returns it: flat or nested, of DTensors, tensors and objects. What it raises is told to all ranks.
        wrapper: torch's ``_DistWrapper`` of the save.
        directory: of the checkpoint.
        prepared: the layout to follow.
        uneven: whether the sizes of shards are not those of mesh and placements (Megatron-FSDP).
        known: the plan of an earlier save.

    Returns:
        The plan, and what to pass to the next save.

    Raises:
        ExchangeError: without a layout, on every rank: the plans do not fit together.
        ConfigurationError: with a layout, on this rank: a value cannot be saved. It has to vote; so it has after what
            ``state_dict`` raises.
    """
    if prepared is None:
        return _plan_together(state_dict, wrapper, directory=directory, uneven=uneven), None
    _clear(directory, wrapper)
    planner = DtensorSavePlanner(state_dict(), prepared)
    holdings = DtensorHoldings.of(planner.state_dict)
    if known is None or known.prepared is not prepared or known.holdings != holdings:
        refuse_plain_optimizer_state(holdings.entries)
        placed = list(_placed_by(prepared, planner, holdings, rank=wrapper.rank, uneven=uneven))
        known = KnownPlan(
            holdings=holdings,
            prepared=prepared,
            local_plan=planner.plan_of(iter(placed)),
            held=_held(placed),
            drift=_drift(prepared, placed),
        )
    planned = PlannedSave(
        local_plan=known.local_plan,
        planner=planner,
        held=known.held,
        prepared=prepared,
        drift=known.drift,
        lengths=planner.lengths,
    )
    return planned, known


def _plan_together(
    state_dict: Callable[[], Mapping[str, Any]], wrapper: Any, *, directory: str, uneven: bool
) -> PlannedSave:
    made: list[tuple[DtensorSavePlanner, list[Placed]]] = []

    def part() -> tuple[SavePlan, Sequence[Entry]]:
        _clear(directory, wrapper)
        planner = DtensorSavePlanner(state_dict(), None)
        entries = DtensorHoldings.of(planner.state_dict).entries
        refuse_plain_optimizer_state(entries)
        placed = [
            Placed(entry=entry, offset=_offset(entry, planner.state_dict[entry.key], wrapper.rank, uneven=uneven))
            for entry in entries
        ]
        made.append((planner, placed))
        return planner.plan_of(_whole(placed)), [entry for entry in entries if uneven and entry.is_sharded]

    def create_global_plan(plans: list[SavePlan]) -> Any:
        return made[0][0].create_global_plan(plans)

    agreed = agree_on_plan(part, create_global_plan, wrapper)
    planner, placed = made[0]
    placed = _as_agreed(placed, agreed)
    return PlannedSave(
        local_plan=planner.plan_of(iter(placed)),
        planner=planner,
        held=_held(placed),
        prepared=None,
        drift=None,
        lengths=planner.lengths,
    )


def _clear(directory: str, wrapper: Any) -> None:
    clear_for_save(
        directory, rank=wrapper.rank, world_size=wrapper.get_world_size(), is_coordinator=wrapper.is_coordinator
    )


def _as_agreed(placed: list[Placed], agreed: Agreed) -> list[Placed]:
    final, number = [], 0
    for each in placed:
        offset = agreed.offsets.get(each.entry.key, each.offset)
        if each.entry.is_empty_shard:
            final.append(replace(each, offset=offset, writes=False))
            continue
        final.append(replace(each, offset=offset, writes=number in agreed.writes))
        number += 1
    return final


def _whole(placed: list[Placed]) -> Iterator[Placed]:
    return (each for each in placed if not each.entry.is_empty_shard)


def _placed_by(
    prepared: PreparedMetadata, planner: DtensorSavePlanner, holdings: DtensorHoldings, *, rank: int, uneven: bool
) -> Iterator[Placed]:
    """Place what this rank holds as the layout says.

    The rank whose slice has an item writes it. What the layout does not know like this is written by its first
    replica, or, where nobody can tell which that is, by every rank that holds it: twice is harmless, never is not.
    """
    texts, own = prepared.known_items, prepared.slice.locators
    has_spreads = prepared.slice.held is not None
    by_key = _by_key(texts if has_spreads else {item: texts.get(item, "") for item in own}) if uneven else {}
    for entry in holdings.entries:
        text = description(entry, with_spread=has_spreads)
        was = _only(by_key.get(entry.key, ())) if entry.is_sharded else None
        if was is not None and texts.get(was) == text:
            offset = was.offset
        else:
            offset = _offset(entry, planner.state_dict[entry.key], rank, uneven=uneven)
        item = Item(entry.key, offset)
        is_known = texts.get(item) == text
        is_ours = entry.spread is None or entry.spread.is_first_replica
        writes = item in own or (is_ours and not is_known)
        yield Placed(entry=entry, offset=offset, writes=writes and not entry.is_empty_shard, was=was)


def _by_key(items: Mapping[Item, str]) -> dict[str, list[Item]]:
    found: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        found[item.fqn].append(item)
    return found


def _only(items: Sequence[Item]) -> Item | None:
    return items[0] if len(items) == 1 else None


def _offset(entry: Entry, value: Any, rank: int, *, uneven: bool) -> Offset | None:
    if entry.dtype is None:
        return None
    if not isinstance(value, DTensor):
        return (0,) * len(entry.shape)
    if (offset := chunk_of_megatron(value)) is not None:
        return offset
    if uneven and entry.is_sharded:
        # Nowhere, so that nobody mistakes it for a place: all ranks together find it out.
        return (-1 - rank,) * len(entry.shape)
    sizes, offset = by_spec(value)
    if sizes != entry.sizes:
        raise ConfigurationError(
            f"{entry.key} has {list(entry.sizes)} of {list(entry.shape)} on this rank, where mesh and placements give "
            f"it {list(sizes)}: pass uneven=True if shards may have any size"
        )
    return offset


def _held(placed: list[Placed]) -> dict[Item, str]:
    return {each.item: description(each.entry, with_spread=True) for each in placed if not each.entry.is_empty_shard}


def _drift(prepared: PreparedMetadata, placed: list[Placed]) -> Drift | None:
    # A plain Metadata does not tell how a tensor lay on a mesh.
    with_spread = prepared.slice.held is not None
    return prepared.held_drift(
        {
            each.was or each.item: description(each.entry, with_spread=with_spread)
            for each in placed
            if not each.entry.is_empty_shard
        }
    )
