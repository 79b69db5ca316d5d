"""Objects of the multi-storage client: there is no rename, so a checkpoint counts by a last small object, its marker.

An upload is all or nothing to a reader, but it is visible when it ends. So ``.metadata`` is uploaded while the save is
still undecided, and publishing it uploads the marker.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import BinaryIO

from megatron_ckpt_ext.compat.dcp import METADATA_FILE
from megatron_ckpt_ext.compat.msc import (
    delete_object,
    file_path,
    list_objects,
    object_size,
    object_url,
    read_object,
    write_object,
)
from megatron_ckpt_ext.publish.storage.files import fsync_directory
from megatron_ckpt_ext.publish.storage.marker import MARKER_FILE, Marker

__all__ = ["Objects", "StagedObject"]


@dataclass(frozen=True, slots=True)
class StagedObject:
    """One small object that is still to be uploaded, and what waits for it."""

    final: str
    """URL of what ``publish`` uploads."""
    content: bytes
    """Its bytes."""
    waiting: str | None
    """URL of the object that counts with it, uploaded already."""

    def publish(self) -> None:
        """Upload the small object. No collectives.

        Raises:
            OSError: it may be there or not.
        """
        _put(self.final, self.content)

    def discard(self) -> None:
        """Remove what waits, unless it counts or nobody can tell; never raises. No collectives."""
        if self.waiting is None:
            return
        with contextlib.suppress(OSError):
            try:
                object_size(self.final)
            except FileNotFoundError:
                _delete(self.waiting)


class Objects:
    """The ``Storage`` of ``msc://`` paths."""

    has_renames = False

    def directory(self, path: str) -> str:
        """Return it as ``msc://profile/prefix``, also where ``pathlib`` took a slash away."""
        return _url(path)

    def is_directory(self, path: str) -> bool:
        """Whether there is any object below; a prefix needs no object of its own."""
        return next(iter(list_objects(_url(path))), None) is not None

    def names(self, directory: str) -> list[str]:
        """Return what lies directly below a prefix, objects and prefixes."""
        return [entry.name for entry in list_objects(_url(directory))]

    def subdirectories(self, directory: str) -> list[str]:
        """Return the prefixes directly below a prefix; empty also where nothing was ever written.

        Raises:
            OSError: it cannot be listed.
        """
        return [entry.name for entry in list_objects(_url(directory)) if entry.is_directory]

    def exists(self, path: str) -> bool:
        """Whether there is an object or a prefix of that name, be it readable or not."""
        try:
            object_size(_url(path))
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def size(self, path: str) -> int:
        """Return the bytes of an object.

        Raises:
            OSError: missing, a prefix, or not readable; ``strerror`` says which.
        """
        return object_size(_url(path))

    def sizes(self, directory: str) -> Callable[[str], int]:
        """Return ``size`` of a name below ``directory``, from one listing; only what it lacks is asked for by name."""
        listed = {entry.name: entry.size for entry in list_objects(_url(directory)) if not entry.is_directory}
        return lambda name: listed[name] if name in listed else self.size(os.path.join(directory, name))

    def open(self, path: str) -> BinaryIO:
        """Read an object into memory."""
        return io.BytesIO(read_object(_url(path)))

    def stage(self, path: str, chunks: Iterable[bytes]) -> StagedObject:
        """Upload ``.metadata`` without its marker; any other, small, content is kept for ``publish`` to upload.

        An older marker goes first, so ``.metadata`` that is only staged never has one.

        Raises:
            OSError: there is no marker.
        """
        url, content = _url(path), b"".join(chunks)
        if os.path.basename(url) != METADATA_FILE:
            return StagedObject(url, content, None)
        marker = os.path.join(os.path.dirname(url), MARKER_FILE)
        _delete(marker)
        _put(url, content)
        return StagedObject(marker, Marker.of(METADATA_FILE, content).to_bytes(), url)

    def sync_names(self, directory: str) -> None:
        """Do nothing: an object that was uploaded has its name."""

    def remove(self, path: str) -> None:
        """Remove an object if it is there.

        Raises:
            OSError: it is there and cannot be removed.
        """
        _delete(_url(path))


def _url(path: str) -> str:
    url = object_url(path)
    if url is None:
        raise ValueError(f"{path!r} is no msc:// path")
    return url


def _put(url: str, content: bytes) -> None:
    write_object(url, content)
    _settle(url)


def _delete(url: str) -> None:
    delete_object(url)
    _settle(url)


def _settle(url: str) -> None:
    """Make what changed durable where the profile lies on a file system: the client leaves that to its user."""
    path = file_path(url)
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            fsync_directory(os.path.dirname(path))
