"""Digests of plain state, equal on two ranks whenever the state is: no object identity, no order of dictionaries."""

import hashlib
import io
import pickle
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["combined_digest", "digests_by_key"]

_BITS = 62


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
    _feed(hasher, value)
    return int.from_bytes(hasher.digest()) >> (64 - _BITS)


def _feed(hasher: "hashlib.blake2b", value: Any) -> None:
    members = _members(value)
    if members is not None:
        hasher.update(b"{")
        for key in sorted(members, key=repr):
            hasher.update(repr(key).encode())
            _feed(hasher, members[key])
    elif isinstance(value, list | tuple):
        hasher.update(b"[")
        for entry in value:
            _feed(hasher, entry)
    elif isinstance(value, set | frozenset):
        hasher.update(repr(sorted(_digest(entry) for entry in value)).encode())
    elif isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype}{list(value.shape)}".encode())
        if value.layout == torch.strided and not value.is_quantized:
            hasher.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    elif value is None or isinstance(value, str | bytes | int | float | complex | bool):
        hasher.update(repr(value).encode())
    else:
        hasher.update(type(value).__qualname__.encode())
        if getattr(value, "__dict__", None):
            _feed(hasher, vars(value))
        else:
            hasher.update(_pickled(value))
    hasher.update(b";")


def _pickled(value: Any) -> bytes:
    """Without a memo, in which equal but not identical members would differ; where that fails, by its type alone."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=4)
    pickler.fast = True
    try:
        pickler.dump(value)
    except Exception:  # what cannot be pickled cannot be saved either; that is not for this check to find
        return b""
    return stream.getvalue()
