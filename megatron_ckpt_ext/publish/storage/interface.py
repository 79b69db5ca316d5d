"""One interface to where a checkpoint lives; what a path begins with says which storage it is."""

from collections.abc import Callable, Iterable
from typing import BinaryIO, Protocol

from megatron_ckpt_ext.compat.msc import object_url
from megatron_ckpt_ext.publish.storage.files import Files
from megatron_ckpt_ext.publish.storage.objects import Objects

__all__ = ["StagedFile", "Storage", "storage_of"]


class StagedFile(Protocol):
    """Something durable that does not count yet. Plain data: another process than the one that staged may publish."""

    def publish(self) -> None:
        """Make it count, durably. No collectives.

        Raises:
            OSError: it may count or not; ``discard`` then takes back what does not.
        """

    def discard(self) -> None:
        """Remove it if it does not count; never raises, for peers may be waiting. No collectives."""


class Storage(Protocol):
    """Files or objects by their full path. No operation has collectives; what fails is an ``OSError``."""

    @property
    def has_renames(self) -> bool:
        """Whether something appears by a rename; where not, a checkpoint needs a marker."""

    def directory(self, path: str) -> str:
        """Return the one spelling of a directory's path."""

    def is_directory(self, path: str) -> bool:
        """Whether something can be listed there."""

    def names(self, directory: str) -> list[str]:
        """Return the names of what lies directly in a directory; empty where there is none."""

    def subdirectories(self, directory: str) -> list[str]:
        """Return the names of the directories directly in a directory.

        Raises:
            OSError: missing, where storage knows directories without content; or it cannot be listed.
        """

    def exists(self, path: str) -> bool:
        """Whether a file of that name is there, be it readable or not."""

    def size(self, path: str) -> int:
        """Return the bytes of a regular file.

        Raises:
            OSError: missing, not readable, no regular file, or no file name; ``strerror`` says which.
        """

    def sizes(self, directory: str) -> Callable[[str], int]:
        """Return ``size`` for many names in one directory, with as few requests as possible."""

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading, seekable."""

    def stage(self, path: str, chunks: Iterable[bytes]) -> StagedFile:
        """Make content durable that does not count yet.

        Raises:
            OSError: nothing that counts is left behind.
        """

    def sync_names(self, directory: str) -> None:
        """Make the names in a directory durable, where that is not so by itself."""

    def remove(self, path: str) -> None:
        """Remove a file durably if it is there.

        Raises:
            OSError: it is there and cannot be removed.
        """


def storage_of(path: str) -> Storage:
    """Return the storage that a path lies in: objects for ``msc://``, else files. No I/O."""
    return Files() if object_url(path) is None else Objects()
