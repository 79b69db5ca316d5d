"""A prepared file on node-local storage: after create every node has it."""

import logging
import os
import socket
from typing import Any, NamedTuple

from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.container import Container
from megatron_ckpt_ext.publish.atomic import write_file

__all__ = ["distribute_file"]

logger = logging.getLogger(__name__)


class _Sight(NamedTuple):
    """What one rank finds at the path."""

    sees: bool
    directory: tuple[str, int, int]
    """Host, device and inode; the last two are -1 where there is no such directory."""


def distribute_file(path: str, identity: str, wrapper: Any) -> None:
    """Bring the coordinator's file to every directory that ``path`` means on some rank.

    Called on all ranks: one all_gather_object, and one broadcast of the file where somebody misses it. One rank
    writes per directory, told apart by host, device and inode, so neither shared storage nor several ranks of a
    node write twice.

    Args:
        path: as on the command line; relative or node-local paths mean another directory on another node.
        identity: of the file that the coordinator wrote.
        wrapper: torch's ``_DistWrapper`` of the save.
    """
    sights = wrapper.all_gather_object(_look(path, identity))
    coordinator = wrapper.coordinator_rank
    if not sights[coordinator].sees or all(sight.sees for sight in sights):
        return
    data = wrapper.broadcast_object(_read(path) if wrapper.is_coordinator else None)
    missing = [rank for rank, sight in enumerate(sights) if not sight.sees]
    writers = {sights[rank].directory: rank for rank in reversed(missing)}
    if wrapper.rank in writers.values():
        _write(path, data)


def _look(path: str, identity: str) -> _Sight:
    host = socket.gethostname()
    try:
        directory = os.stat(os.path.dirname(os.path.abspath(path)))
    except OSError:  # one rank of the host will find out why it cannot write, and say so
        return _Sight(False, (host, -1, -1))
    try:
        with Container.open(path) as file:
            sees = file.has_trailer and file.header().get("identity") == identity
    except PreparedFileError:
        sees = False
    return _Sight(sees, (host, directory.st_dev, directory.st_ino))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write(path: str, data: bytes) -> None:
    try:
        write_file(path, [data])
    except OSError as error:
        logger.warning(
            "The prepared metadata %s could not be written on %s (%s); later jobs on this node need "
            "--ckpt-metadata-create again.",
            path,
            socket.gethostname(),
            error.strerror,
        )
