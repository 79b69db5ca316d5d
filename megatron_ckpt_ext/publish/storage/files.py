"""Local and shared file systems: temporary name, flush, fsync, rename, directory fsync."""

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import BinaryIO

__all__ = ["Files", "StagedRename", "fsync_directory"]


@dataclass(frozen=True, slots=True)
class StagedRename:
    """A durable file under a temporary name, waiting for its rename."""

    temporary: str
    """Where the bytes are now, in the directory of ``final``."""
    final: str
    """The name that ``publish`` gives them."""

    def publish(self) -> None:
        """Rename to the final name and make the rename durable. No collectives.

        Raises:
            OSError: the rename failed and the temporary file is still there, or the rename is not durable yet.
        """
        os.rename(self.temporary, self.final)
        fsync_directory(os.path.dirname(self.final))

    def discard(self) -> None:
        """Remove the temporary file if that is possible; never raises, for peers may be waiting. No collectives."""
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)


class Files:
    """The ``Storage`` of paths that are files."""

    has_renames = True

    def directory(self, path: str) -> str:
        """Return it as it is."""
        return path

    def is_directory(self, path: str) -> bool:
        """Whether it is a directory, or a link to one."""
        return os.path.isdir(path)

    def names(self, directory: str) -> list[str]:
        """Return what lies in a directory; empty where there is none."""
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []

    def subdirectories(self, directory: str) -> list[str]:
        """Return the directories in a directory, links to directories included.

        Raises:
            OSError: missing, or it cannot be listed.
        """
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if entry.is_dir()]

    def exists(self, path: str) -> bool:
        """Whether there is anything of that name, a link to nothing included."""
        return os.path.lexists(path)

    def size(self, path: str) -> int:
        """Return the bytes of a regular file.

        Raises:
            OSError: missing, not readable, no regular file, or no file name; ``strerror`` says which.
        """
        try:
            found = os.stat(path)
        except ValueError as error:
            raise OSError(errno.EINVAL, "Not a file name") from error
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file")
        return found.st_size

    def sizes(self, directory: str) -> Callable[[str], int]:
        """Return ``size`` of a name in ``directory``."""
        return lambda name: self.size(os.path.join(directory, name))

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        return open(path, "rb")

    def stage(self, path: str, chunks: Iterable[bytes]) -> StagedRename:
        """Write ``chunks`` durably beside ``path``, to be renamed later.

        Raises:
            OSError: nothing is left behind.
        """
        staged = StagedRename(f"{path}.{uuid.uuid4().hex[:12]}.tmp", path)
        try:
            with open(staged.temporary, "xb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            staged.discard()
            raise
        return staged

    def sync_names(self, directory: str) -> None:
        """Sync the directory, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            fsync_directory(directory)

    def remove(self, path: str) -> None:
        """Remove a file durably if it is there.

        Raises:
            OSError: it is there and cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            fsync_directory(os.path.dirname(path))


def fsync_directory(directory: str) -> None:
    """Make the names in a directory durable; an empty name is the working directory. No collectives.

    Raises:
        OSError: it cannot be opened or synced.
    """
    descriptor = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
