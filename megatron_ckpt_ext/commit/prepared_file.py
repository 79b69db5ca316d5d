"""Writing the prepared file for later jobs: where we may, and on every node that has its own storage."""

import logging
import os
import socket
import stat
from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron_ckpt_ext.compat.dcp import METADATA_FILE
from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.container import Container
from megatron_ckpt_ext.publish.atomic import write_file

__all__ = ["PreparedFile", "distribute_file", "is_checkpoint_file"]

logger = logging.getLogger(__name__)


class PreparedFile:
    """Where the layout is kept for later jobs, for the length of this one."""

    def __init__(self, path: str) -> None:
        """Name the file of ``--ckpt-metadata``. No collectives."""
        self.path = path
        self._warned = False

    def why_untouched(self) -> str | None:
        """Look at what is there now and say why it must not be rewritten, or ``None``. No collectives."""
        if is_checkpoint_file(self.path):
            return "it belongs to a checkpoint"
        if not os.path.exists(self.path):
            return None
        with Container.open(self.path) as file:
            if not file.has_trailer:
                return "it is not one that --ckpt-metadata-create made"
        mode = os.stat(self.path).st_mode
        if not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) or not os.access(self.path, os.W_OK):
            return "it is read-only"
        return None

    def write(self, chunks: Iterable[bytes]) -> bool:
        """Write it if we may; else warn, once a job. The checkpoint is published already, so nothing is raised.

        Returns:
            Whether it was written.
        """
        try:
            reason = self.why_untouched()
            if reason is None:
                write_file(self.path, chunks)
        except Exception as error:  # the peers wait for the coordinator's answer
            reason = f"it could not be written ({type(error).__name__}: {error})"
        if reason is not None and not self._warned:
            self._warned = True
            logger.warning(
                "The prepared metadata %s does not have the current layout, %s. This job goes on with the layout in "
                "memory; a later job needs --ckpt-metadata-create and a file of its own.",
                self.path,
                reason,
            )
        return reason is None


def is_checkpoint_file(path: str) -> bool:
    """Whether ``path`` is, or would be, a part of a checkpoint. No collectives."""
    directory = os.path.dirname(os.path.abspath(path))
    marks = (METADATA_FILE, "metadata.json")
    return os.path.basename(path) in marks or any(os.path.exists(os.path.join(directory, mark)) for mark in marks)


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
    if data is None:
        return
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
    except (PreparedFileError, OSError):
        sees = False
    return _Sight(sees, (host, directory.st_dev, directory.st_ino))


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:  # the peers wait for the broadcast
        logger.warning("The prepared metadata %s cannot be read back for the other nodes (%s).", path, error.strerror)
        return None


def _write(path: str, data: bytes) -> None:
    """Write it on this node, by the same rules as on the coordinator's."""
    try:
        reason = PreparedFile(path).why_untouched()
        if reason is None:
            write_file(path, [data])
    except (OSError, PreparedFileError) as error:
        reason = str(error)
    if reason is not None:
        logger.warning(
            "The prepared metadata %s was not written on %s: %s. Later jobs on this node need --ckpt-metadata-create.",
            path,
            socket.gethostname(),
            reason,
        )
