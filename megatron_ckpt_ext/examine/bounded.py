"""A bound on memory for reading what nobody vouches for: four flipped bits of a pickle can ask for 64 GiB."""

import contextlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path

__all__ = ["bounded_memory"]

_SHARE = 0.75
"""Of the memory that is available now."""


@contextlib.contextmanager
def bounded_memory(limit: int | None = None) -> Iterator[None]:
    """Let this process take so much more memory and no more: beyond it is a ``MemoryError``.

    For processes of their own: it holds for all threads. Without Linux's ``/proc`` nothing is bounded.

    Args:
        limit: in bytes; by default three quarters of what is available.
    """
    try:
        used = 1024 * _number("/proc/self/status", "VmData")
        more = limit or int(_SHARE * 1024 * _number("/proc/meminfo", "MemAvailable"))
    except (OSError, LookupError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    known = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    bound = min(used + more, *known) if known else used + more
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _number(file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(file).read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(name)
    return int(found[1])
