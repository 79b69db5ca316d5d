"""``save_state_dict_async_finalize``: the last of the three parts of an asynchronous save."""

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from megatron_ckpt_ext.commit.commit import OnDrift, SaveCommit
from megatron_ckpt_ext.commit.prepared_file import PreparedFile
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
    on_drift: OnDrift = OnDrift.REBUILD,
) -> PreparedMetadata:
    """Agree on the outcome of a save and publish its ``.metadata``.

    Called on all ranks, after the background write has ended on all of them. With ``reuse_metadata_obj``: one MIN
    all_reduce, and more only where the layout changed. Otherwise also one gather_object and one broadcast, with
    ``create_metadata_path`` what it takes to bring the file to every node.

    Args:
        storage_writer: the writer of the plan.
        global_metadata: second element of the plan's result.
        dist_wrapper: third element of the plan's result.
        reuse_metadata_obj: the layout that was planned with.
        create_metadata_path: where to make the prepared file.
        fingerprint: settings to record in a new layout; by default the world size only.
        on_drift: what to do where the save does not match the layout.

    Returns:
        On every rank the layout to pass to the next save: own slice; bytes of the whole on the coordinator only.

    Raises:
        ValueError: reuse and create together, or reuse of something that was not planned with it.
        WriteFailedError: a rank could not write; on every rank.
        MetadataReuseError: a rank drifted and ``on_drift`` is ``fail``; on every rank.
        OSError: on the coordinator only, if the last rename fails. ``AsyncSaveQueue`` shares that with all ranks.
    """
    if reuse_metadata_obj is not None and create_metadata_path is not None:
        raise ValueError(
            "reuse_metadata_obj and create_metadata_path were both given: a save either follows a prepared "
            "metadata or makes one, pass one of them"
        )
    if reuse_metadata_obj is not None and global_metadata.prepared is None:
        raise ValueError(
            "reuse_metadata_obj was given to finalize but not to save_state_dict_async_plan: pass it to both"
        )
    if create_metadata_path is not None and global_metadata.prepared is not None:
        raise ValueError(
            "create_metadata_path was given for a save that was planned with reuse_metadata_obj: a save either follows "
            "a prepared metadata or makes one, plan it without"
        )
    commit = SaveCommit(
        storage_writer,
        global_metadata,
        dist_wrapper,
        fingerprint=fingerprint or Fingerprint(world_size=dist_wrapper.get_world_size()),
        file=None if create_metadata_path is None else PreparedFile(create_metadata_path),
        on_drift=on_drift,
    )
    return commit.run().prepared
