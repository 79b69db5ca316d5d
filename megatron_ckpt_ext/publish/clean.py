"""Making room for a save in a directory that an earlier attempt left behind. Needs no barrier.

The order matters: what says that the old checkpoint is complete goes first, durably, and on every rank, so that no
reader takes old ``.metadata`` for a description of new bytes; then each rank removes its own files, and nobody else's.
"""

import os
import re

from megatron_ckpt_ext.compat.dcp import METADATA_FILE
from megatron_ckpt_ext.metadata.layout import owner_of
from megatron_ckpt_ext.publish.storage.interface import storage_of
from megatron_ckpt_ext.publish.storage.marker import MARKER_FILE

__all__ = ["clear_for_save"]

_TEMPORARY = re.compile(
    r"(\.metadata|metadata\.json)\.[0-9a-f]{12}\.tmp|\.metadata\.tmp|\.(\.metadata|\.complete|metadata\.json)\.tmp"
)
"""Of ours on a file system, of torch's own writer, and of the multi-storage client where a profile lies on one."""


def clear_for_save(directory: str, *, rank: int, world_size: int, is_coordinator: bool) -> None:
    """Remove what must not be mixed with the files of a new save. Idempotent; no collectives.

    Args:
        directory: of the checkpoint; may not exist yet.
        rank: whose data files may be removed.
        world_size: ranks of the job; the coordinator also removes files of ranks that there are no more.
        is_coordinator: whether this rank publishes.

    Raises:
        OSError: something is there and cannot be removed.
    """
    storage = storage_of(directory)
    names = storage.names(directory)
    for name in (MARKER_FILE, METADATA_FILE):
        # A listing of a shared file system may be behind. That of objects is not, and each request counts: all ranks
        # send theirs at the same moment.
        if storage.has_renames or name in names:
            storage.remove(os.path.join(directory, name))
    for name in names:
        owner = owner_of(name)
        is_own = owner == rank
        is_nobodys = owner is not None and owner >= world_size or bool(_TEMPORARY.fullmatch(name))
        if is_own or (is_coordinator and is_nobodys):
            storage.remove(os.path.join(directory, name))
