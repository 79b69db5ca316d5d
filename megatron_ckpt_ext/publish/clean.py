"""Making room for a save in a directory that an earlier attempt left behind. Needs no barrier.

The order matters: the old completeness marker goes first, durably, and on every rank, so that no reader takes old
``.metadata`` for a description of new bytes; then each rank removes its own files, and nobody else's.
"""

import os
import re
from collections.abc import Iterator

from megatron_ckpt_ext.compat.dcp import METADATA_FILE
from megatron_ckpt_ext.metadata.layout import owner_of
from megatron_ckpt_ext.publish.atomic import remove_file

__all__ = ["clear_for_save"]

_OUR_TEMPORARY = re.compile(r"(\.metadata|metadata\.json)\.[0-9a-f]{12}\.tmp")


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
    remove_file(os.path.join(directory, METADATA_FILE))
    for name in list(_names(directory)):
        owner = owner_of(name)
        is_own = owner == rank
        is_nobodys = owner is not None and owner >= world_size or bool(_OUR_TEMPORARY.fullmatch(name))
        if is_own or (is_coordinator and is_nobodys):
            remove_file(os.path.join(directory, name))


def _names(directory: str) -> Iterator[str]:
    try:
        yield from os.listdir(directory)
    except FileNotFoundError:
        return
