"""What tests look at from outside: child processes, memory, shared memory, and the groups on which ranks communicate.

Linux only, like the writer: everything is read from ``/proc``.
"""

import gc
import json
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed import distributed_c10d

__all__ = [
    "Groups",
    "Notes",
    "children",
    "fill",
    "noting_forks",
    "resident_bytes",
    "shared_bytes",
    "still_in_use",
    "watched",
]

_KIB = 1024
_LIBRARY = os.path.dirname(os.__file__)


def children(pid: int | str = "self") -> set[int]:
    """Process ids of the living children of a process."""
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found |= set(map(int, (thread / "children").read_text().split()))
    return found


def resident_bytes(pid: int) -> int:
    """Memory of a process, what it shares with others included."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return _KIB * int(next(line.split()[1] for line in lines if line.startswith("VmRSS:")))


def shared_bytes(pid: int | str = "self") -> int:
    """Bytes of the tensors in shared memory that a process keeps alive, by mapping them or by holding a descriptor."""
    sizes = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/dev/shm/torch_" in line:
            span, inode = line.split()[0], line.split()[4]
            first, last = (int(address, 16) for address in span.split("-"))
            sizes[inode] = last - first
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "/dev/shm/torch_" in os.readlink(descriptor):
                status = os.stat(descriptor)
                sizes[str(status.st_ino)] = status.st_size
        except FileNotFoundError:  # that of the listing itself
            continue
    return sum(sizes.values())


def entries(state: Any) -> Iterator[ShardedTensor]:
    """The sharded tensors in a state dict of Megatron."""
    for entry in state.values() if isinstance(state, dict) else state:
        if isinstance(entry, dict | list):
            yield from entries(entry)
        elif isinstance(entry, ShardedTensor):
            yield entry


def fill(state: Any, value: float) -> None:
    """What an optimizer does to its tensors: new values in place."""
    for entry in entries(state):
        entry.data.fill_(value)


def watched(state: Any) -> "list[weakref.ref[Any]]":
    """Put the tensors of a state dict into memory that tells when it is free.

    A reference to the tensor object would not do: ``detach`` makes another object of the same memory.
    """
    found = []
    for entry in entries(state):
        tensor = entry.data
        memory = tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()
        entry.data = torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)
        found.append(weakref.ref(memory))
    return found


def still_in_use(memories: "list[weakref.ref[Any]]") -> int:
    """How many of them something still holds."""
    gc.collect()
    return sum(memory() is not None for memory in memories)


def noting_forks(
    note: Callable[[str, str], None], gate: Path | None, function: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """In the writer, in place of ``function``: behind ``gate``, and every fork of the process from here on is noted."""
    sys.addaudithook(lambda event, _arguments: note("fork", "the writer") if event == "os.fork" else None)
    while gate is not None and not gate.exists():
        time.sleep(0.01)
    return function(*arguments, **options)


class Notes:
    """A file of notes, one JSON line each: kind and content. Travels to other processes."""

    def __init__(self, path: str) -> None:
        self._path = path

    def add(self, kind: str, content: Any) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps([kind, content]) + "\n")

    def hear(self, event: str, _arguments: Any) -> None:
        """Be an audit hook of Python."""
        if event == "os.fork":
            files = [frame.filename for frame in traceback.extract_stack()[:-1]]
            self.add("fork", next((file for file in reversed(files) if not file.startswith(_LIBRARY + os.sep)), ""))


class Groups:
    """Which process groups of this rank have communicated since this was made: gloo counts the calls of a group."""

    def __init__(self) -> None:
        self._before = self._now()

    def used(self) -> dict[str, str]:
        """Name of each group that has communicated -> its backend."""
        now = self._now()
        moved = [name for name, (count, _) in now.items() if count != self._before.get(name, (0, ""))[0]]
        return {name: now[name][1] for name in moved}

    @staticmethod
    def default() -> str:
        """Name of the default group."""
        group: Any = distributed_c10d._get_default_group()
        return str(group.group_name)

    @staticmethod
    def _now() -> dict[str, tuple[int, str]]:
        groups: list[Any] = list(distributed_c10d._world.pg_map)
        return {
            str(group.group_name): (group._get_sequence_number_for_group(), str(distributed_c10d.get_backend(group)))
            for group in groups
        }
