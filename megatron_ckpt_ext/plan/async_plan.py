"""``save_state_dict_async_plan``: the first of the three parts of an asynchronous save.

Same place in the flow and same parameters as NVRx's function of that name (plan, then write in the background,
then ``save_state_dict_async_finalize``), plus ``reuse_metadata_obj``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from megatron_ckpt_ext.compat.dcp import DistWrapper
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.metadata.guard import Drift
from megatron_ckpt_ext.metadata.items import OBJECT, describe_tensor, item_of, merge_descriptions
from megatron_ckpt_ext.metadata.layout import Item
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.padding import pad_non_tensor_items
from megatron_ckpt_ext.publish.clean import clear_for_save

__all__ = ["PlanResult", "PlannedSave", "failed_plan", "failed_save", "held_in_plan", "save_state_dict_async_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSave:
    """What planning found out, for ``save_state_dict_async_finalize``."""

    local_plan: SavePlan
    """What this rank writes, as a collective plan would take it."""
    planner: Any
    """The planner that made it, to make a global plan where one is needed."""
    held: Mapping[Item, str]
    """Everything this rank holds."""
    prepared: PreparedMetadata | None
    """The layout that this save follows, if any."""
    drift: Drift | None
    """First difference between what this rank holds and the prepared metadata."""
    lengths: Mapping[Item, int] = field(default_factory=dict)
    """Bare length of each non-tensor item that this rank writes, in bytes."""
    failure: str | None = None
    """Why this rank has no plan; its peers have one, so this is a vote like any other."""


class PlanResult(NamedTuple):
    """Arguments of ``save_state_dict_async_finalize``, in order."""

    storage_writer: Any
    """The writer that was passed in, ready to write."""
    global_metadata: PlannedSave
    """In the place of NVRx's metadata."""
    dist_wrapper: Any
    """torch's ``_DistWrapper`` of the save."""


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: Any,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: Any = None,
    *,
    reuse_metadata_obj: PreparedMetadata | Metadata | None = None,
    held_items: Mapping[Item, str] | None = None,
    local_plan: SavePlan | None = None,
) -> PlanResult:
    """Plan a save and resolve its data.

    Called on all ranks; no collectives. A rank that does not match its slice plans as usual, and reports drift when
    the save is finalized. Without a layout to follow the plans are gathered then, with the write results. What an
    earlier attempt left in the directory is removed, its ``.metadata`` first.

    Args:
        state_dict: torch DCP state dict of this rank, flat.
        storage_writer: NVRx ``FileSystemWriterAsync`` of this checkpoint.
        process_group: ranks of the save; ``None`` is the default group.
        coordinator_rank: rank in the group that publishes.
        planner: a planner that can plan locally (``can_run_decentralized_global_plan``).
        reuse_metadata_obj: the layout to follow; a plain ``Metadata`` must be complete.
        held_items: everything this rank holds, written or not; by default what the local plan writes.
        local_plan: of an earlier save of a state dict with the same items in the same order, to save making it again.

    Returns:
        The positional arguments of ``save_state_dict_async_finalize``.

    Raises:
        ConfigurationError: on every rank: planner or writer cannot plan locally.
    """
    if not (_plans_locally(planner) and _plans_locally(storage_writer)):
        raise ConfigurationError(
            f"{type(planner).__name__} with {type(storage_writer).__name__} cannot plan without a scatter: pass a "
            "planner and a writer whose can_run_decentralized_global_plan is true"
        )
    wrapper = DistWrapper(process_group, dist.is_initialized(), coordinator_rank)
    clear_for_save(
        str(storage_writer.checkpoint_id),
        rank=wrapper.rank,
        world_size=wrapper.get_world_size(),
        is_coordinator=wrapper.is_coordinator,
    )
    planner.set_up_planner(state_dict, is_coordinator=wrapper.is_coordinator)
    storage_writer.set_up_storage_writer(wrapper.is_coordinator)
    local_plan = storage_writer.prepare_local_plan(local_plan or planner.create_local_plan())
    held = held_in_plan(local_plan) if held_items is None else held_items
    prepared = _as_prepared(reuse_metadata_obj, wrapper)
    _resolve_data(local_plan, storage_writer, planner)
    lengths = pad_non_tensor_items(storage_writer, prepared)
    drift = None if prepared is None else prepared.held_drift(held)
    planned = PlannedSave(
        local_plan=local_plan, planner=planner, held=held, prepared=prepared, drift=drift, lengths=lengths
    )
    return PlanResult(storage_writer, planned, wrapper)


def held_in_plan(plan: SavePlan) -> dict[Item, str]:
    """Describe every item of a local plan; right for a state dict that is planned without deduplication."""
    return merge_descriptions(
        (
            item_of(write.index),
            OBJECT
            if write.tensor_data is None
            else describe_tensor(
                write.tensor_data.properties.dtype, write.tensor_data.chunk.sizes, write.tensor_data.size
            ),
        )
        for write in plan.items
    )


def failed_plan(
    error: BaseException, process_group: dist.ProcessGroup | None, prepared: PreparedMetadata | None
) -> PlanResult:
    """Return what takes the place of a plan on a rank that could not make one. No collectives."""
    return PlanResult(None, failed_save(error, prepared), DistWrapper(process_group, dist.is_initialized(), 0))


def failed_save(error: BaseException, prepared: PreparedMetadata | None) -> PlannedSave:
    """Return what this rank votes with where it could not plan. No collectives."""
    return PlannedSave(
        local_plan=SavePlan([]),
        planner=None,
        held={},
        prepared=prepared,
        drift=None,
        failure=f"planning failed: {type(error).__name__}: {error}",
    )


def _plans_locally(part: Any) -> bool:
    return bool(getattr(part, "can_run_decentralized_global_plan", False))


def _as_prepared(reuse: PreparedMetadata | Metadata | None, wrapper: Any) -> PreparedMetadata | None:
    if reuse is None or isinstance(reuse, PreparedMetadata):
        return reuse
    return PreparedMetadata.from_metadata(reuse, wrapper.rank, coordinator=wrapper.coordinator_rank)


def _resolve_data(local_plan: SavePlan, storage_writer: Any, planner: Any) -> None:
    plan = planner.create_decentralized_global_plan(local_plan)
    plan = storage_writer.prepare_decentralized_global_plan(plan)
    storage_writer.prepare_write_data(planner.finish_plan(plan), planner)
