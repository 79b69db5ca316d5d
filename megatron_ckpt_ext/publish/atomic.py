"""Files that appear whole: temporary name, flush, fsync, rename, directory fsync."""

import contextlib
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["StagedFile", "remove_file", "stage_file", "write_file"]


@dataclass(frozen=True, slots=True)
class StagedFile:
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
        _fsync_directory(os.path.dirname(self.final) or ".")

    def discard(self) -> None:
        """Remove the temporary file if that is possible; never raises, for peers may be waiting. No collectives."""
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)


def stage_file(path: str, chunks: Iterable[bytes]) -> StagedFile:
    """Write ``chunks`` durably beside ``path``, to be published later. No collectives.

    Raises:
        OSError: nothing is left behind.
    """
    staged = StagedFile(f"{path}.{uuid.uuid4().hex[:12]}.tmp", path)
    try:
        with open(staged.temporary, "xb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        staged.discard()
        raise
    return staged


def write_file(path: str, chunks: Iterable[bytes]) -> None:
    """Make ``path`` appear with the bytes of ``chunks``, replacing an older file. No collectives.

    Raises:
        OSError: nothing is left behind; the older file, if any, is untouched unless only the last step, which makes
            the rename durable, failed.
    """
    staged = stage_file(path, chunks)
    try:
        staged.publish()
    except BaseException:
        staged.discard()
        raise


def remove_file(path: str) -> None:
    """Remove ``path`` durably if it is there. No collectives.

    Raises:
        OSError: it is there and cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
        _fsync_directory(os.path.dirname(path) or ".")


def _fsync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
