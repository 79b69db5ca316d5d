"""Digests of plain state, equal on two ranks whenever the state is: no object identity, no order of dictionaries."""

import hashlib
import re
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch

__all__ = ["combined_digest", "digests_by_key"]

_BITS = 62
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DEPTH = 8
"""Common state is shallow; objects that point at each other are not walked for ever."""


def digests_by_key(state: Mapping[str, Any]) -> dict[str, int]:
    """Digest each entry of a state dict by itself; an ``argparse.Namespace`` counts as a dictionary. No collectives.

    Returns:
        ``"key"``, or ``"key/name"`` for the members of a dictionary in it, -> a number below 2**62.
    """
    found = {}
    for key, value in state.items():
        members = _members(value)
        if members is None:
            found[str(key)] = _digest(value)
        else:
            found |= {f"{key}/{name}": _digest(member) for name, member in members.items()}
    return found


def combined_digest(digests: Mapping[str, int]) -> int:
    """Return one number below 2**62 for all of them."""
    return _digest(sorted(digests.items()))


def _members(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Namespace):
        return vars(value)
    return value if isinstance(value, Mapping) else None


def _digest(value: Any) -> int:
    hasher = hashlib.blake2b(digest_size=8)
    _feed(hasher, value, _DEPTH)
    return int.from_bytes(hasher.digest()) >> (64 - _BITS)


def _feed(hasher: "hashlib.blake2b", value: Any, depth: int) -> None:
    """Hash what the state says. What lies deeper than ``depth`` counts by its type, what shows no parts by its repr."""
    if value is None or isinstance(value, str | bytes | int | float | complex | bool):
        hasher.update(f"{type(value).__name__} {value!r};".encode())
        return
    hasher.update(f"{type(value).__qualname__};".encode())
    if isinstance(value, torch.Tensor):
        _feed_tensor(hasher, value)
    elif isinstance(value, Enum):
        hasher.update(value.name.encode())
    elif isinstance(value, set | frozenset):
        hasher.update(repr(sorted(_digest(entry) for entry in value)).encode())
    elif isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind != "O":
        hasher.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif depth > 0:
        parts = _parts(value)
        if parts is None:
            hasher.update(_ADDRESS.sub("", repr(value)).encode())
        else:
            for entry in parts:
                _feed(hasher, entry, depth - 1)
    hasher.update(b".")


def _parts(value: Any) -> Iterable[Any] | None:
    """What a container or object consists of, in an order that equal ones share; ``None`` if only it can say."""
    if isinstance(value, list | tuple | deque):
        return value
    members = _members(value)
    if members is None and not isinstance(value, type | FunctionType | ModuleType):
        members = getattr(value, "__dict__", None)
    if members is None:
        return None
    pairs: list[tuple[Any, Any]] = list(members.items())
    pairs.sort(key=lambda pair: repr(pair[0]))
    return chain.from_iterable(pairs)


def _feed_tensor(hasher: "hashlib.blake2b", value: torch.Tensor) -> None:
    hasher.update(f"{value.dtype}{list(value.shape)}".encode())
    if value.layout == torch.strided and not value.is_quantized:
        hasher.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
