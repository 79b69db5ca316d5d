"""Lending the coordinator's layout to its writer process: memory that has a path as long as the trainer lives."""

import os
import zlib

from megatron_ckpt_ext.metadata.body import BodyFile

__all__ = ["LentBody"]


class LentBody:
    """Holds one layout in an anonymous file (memfd_create(2)). Owns it; ``close`` gives it back. No collectives.

    A writer process that is replaced needs no new copy, and neither the room in ``/dev/shm`` nor a disk limits it.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self._body: bytes | None = None
        self._file: BodyFile | None = None
        self._descriptor: int | None = None

    def lend(self, body: bytes | BodyFile) -> BodyFile:
        """Return a reference that this process and those it started can read, until another body is lent.

        Raises:
            OSError: there is no memory for it.
        """
        if isinstance(body, BodyFile):
            return body
        if self._file is None or self._body is not body:
            self.close()
            self._descriptor = os.memfd_create("layout")
            with open(self._descriptor, "wb", closefd=False) as memory:
                memory.write(body)
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self._file = BodyFile(path=path, length=len(body), crc=zlib.crc32(body))
            self._body = body
        return self._file

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        self._body, self._file = None, None
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
