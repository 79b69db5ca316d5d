"""``save_state_dict_async_finalize``: the last of the three parts of an asynchronous save."""

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from megatron_ckpt_ext.commit.create import finalize_create
from megatron_ckpt_ext.commit.reuse import finalize_reuse
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.async_plan import PlannedSave

__all__ = ["save_state_dict_async_finalize"]


def save_state_dict_async_finalize(
    storage_writer: Any,
    global_metadata: PlannedSave,
    dist_wrapper: Any,
    reuse_metadata_obj: PreparedMetadata | Metadata | None = None,
    create_metadata_path: str | None = None,
    *,
    fingerprint: Fingerprint | None = None,
) -> PreparedMetadata | None:
    """Agree on the outcome of a save and publish its ``.metadata``.

    Called on all ranks, after the background write has ended on all of them. With ``reuse_metadata_obj``: one MIN
    all_reduce. With ``create_metadata_path``: the collective path of ``commit.create``. With neither: NVRx's own
    finalize (a gather_object and a broadcast).

    Args:
        storage_writer: the writer of the plan.
        global_metadata: second element of the plan's result.
        dist_wrapper: third element of the plan's result.
        reuse_metadata_obj: the layout that was planned with.
        create_metadata_path: where to make the prepared file.
        fingerprint: settings to record in it; by default the world size only.

    Returns:
        On every rank the prepared metadata (own slice; layout bytes on the coordinator only), or ``None`` without
        reuse and create.

    Raises:
        ValueError: reuse and create together, or reuse here but not in the plan, or the other way round.
        WriteFailedError: a rank could not write; on every rank.
        MetadataReuseError: a rank drifted; on every rank.
    """
    if reuse_metadata_obj is not None and create_metadata_path is not None:
        raise ValueError(
            "reuse_metadata_obj and create_metadata_path were both given: a save either follows a prepared "
            "metadata or makes one, pass one of them"
        )
    if reuse_metadata_obj is not None:
        if global_metadata.prepared is None:
            raise ValueError(
                "reuse_metadata_obj was given to finalize but not to save_state_dict_async_plan: pass it to both"
            )
        return finalize_reuse(storage_writer, global_metadata, global_metadata.prepared, dist_wrapper)
    if global_metadata.prepared is not None:
        raise ValueError(
            "reuse_metadata_obj was given to save_state_dict_async_plan but not to finalize: pass it to both"
        )
    if create_metadata_path is not None:
        return finalize_create(
            storage_writer,
            global_metadata,
            dist_wrapper,
            path=create_metadata_path,
            fingerprint=fingerprint or Fingerprint(world_size=dist_wrapper.get_world_size()),
        )
    from megatron_ckpt_ext.compat.nvrx import stock_finalize

    stock_finalize(storage_writer, global_metadata.metadata, dist_wrapper)
    return None
