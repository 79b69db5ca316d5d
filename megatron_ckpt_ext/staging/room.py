"""How much host memory there is to stage into."""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from megatron_ckpt_ext.staging.errors import NoRoomError

__all__ = ["free_memory", "require_room"]

_LIMIT_AND_USAGE = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""File names of version 2 and version 1 of cgroups."""


def require_room(*, needed: int, new: int, limit: int | None, free_memory: Callable[[], int]) -> None:
    """Refuse a state dict that is too large. No collectives.

    Args:
        needed: bytes of all buffers.
        new: by how many bytes the buffers have to grow; negative if they shrink.
        limit: the byte budget for all buffers.
        free_memory: asked only if it matters.

    Raises:
        NoRoomError: it is larger than the budget or the free memory.
    """
    in_budget = limit is None or needed <= limit
    if in_budget and new <= 0:
        return
    free = free_memory()
    if not in_budget or new > free:
        raise NoRoomError(needed=needed, new=new, limit=limit, free=free)


def free_memory(root: Path = Path("/")) -> int:
    """Return how many bytes this process can still allocate: what the machine has, within the limits of its cgroups.

    Page cache counts as free, as it does in the kernel's own MemAvailable: written checkpoints fill it.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    machine = int(_fields(root / "proc/meminfo")["MemAvailable:"]) * 1024
    return min([machine, *chain.from_iterable(_free_in(group) for group in _cgroups(root))])


def _cgroups(root: Path) -> Iterator[Path]:
    """Each directory that may limit this process, from its own cgroup up to the root of the hierarchy."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        # In a container the path may be the host's, which is not mounted: then only the top is there.
        own = top / path.lstrip("/")
        yield from (each for each in (own, *own.parents) if each.is_relative_to(top))


def _free_in(group: Path) -> Iterator[int]:
    """What the limit of a cgroup leaves, if it has one."""
    for limit, usage in _LIMIT_AND_USAGE:
        if (group / limit).exists() and (allowed := (group / limit).read_text().strip()) != "max":
            yield max(0, int(allowed) - int((group / usage).read_text()) + _page_cache(group))


def _page_cache(group: Path) -> int:
    """Bytes that the kernel takes back before it refuses memory; version 1 sums up the hierarchy under other names."""
    fields = _fields(group / "memory.stat")
    prefix = "total_" if "total_inactive_file" in fields else ""
    return int(fields[f"{prefix}inactive_file"]) + int(fields[f"{prefix}active_file"])


def _fields(file: Path) -> dict[str, str]:
    """First and second word of each line."""
    return dict(line.split()[:2] for line in file.read_text().splitlines())
