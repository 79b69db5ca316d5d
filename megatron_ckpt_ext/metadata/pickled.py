"""Reading and writing a pickled ``Metadata`` without running foreign code.

Reading goes through an unpickler with an allow-list. Writing separates the *body*, a pickle of everything that
stays the same from save to save, from the few bytes that name one checkpoint (``storage_meta``): those are
appended, so publishing never pickles the layout again.

The format is Python's pickle protocol 4, see the opcode documentation in CPython's ``pickletools``.
"""

import gc
import io
import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import EnumType
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron_ckpt_ext.compat.dcp import METADATA_GLOBALS, PLAN_GLOBALS
from megatron_ckpt_ext.errors import PreparedFileError

__all__ = ["load_metadata", "metadata_body", "paused_garbage_collection", "with_storage_meta"]

_PROTOCOL = 4
_STOP = pickle.STOP
_PROTO_2 = pickle.PROTO + b"\x02"


def load_metadata(data: bytes, *, origin: str) -> Metadata:
    """Unpickle a whole ``Metadata``; ``data`` must end with the pickle. No collectives.

    Args:
        data: the pickle, nothing behind it.
        origin: where the bytes come from, for the error.

    Raises:
        PreparedFileError: damaged, not a ``Metadata``, or a name outside the allow-list.
    """
    stream = io.BytesIO(data)
    try:
        with paused_garbage_collection():
            loaded = _AllowListUnpickler(stream).load_unchanged()
    except PreparedFileError as error:
        raise PreparedFileError(f"{origin}: {error}") from error
    except Exception as error:
        raise PreparedFileError(f"{origin} is damaged, it cannot be read as a pickled Metadata: {error}") from error
    if stream.read(1):
        raise PreparedFileError(f"{origin} is damaged: bytes follow the pickled Metadata, but no trailer of ours")
    if not isinstance(loaded, Metadata) or not isinstance(loaded.storage_data, dict):
        raise PreparedFileError(f"{origin} holds a {type(loaded).__name__}, not a checkpoint's Metadata")
    return loaded


def metadata_body(metadata: Metadata) -> bytes:
    """Pickle everything of ``metadata`` that does not name one checkpoint, without the closing opcode.

    Attributes that are no fields of ``Metadata`` (``all_local_plans``) are left out. Not a valid pickle before
    ``with_storage_meta``. No collectives.
    """
    pristine = replace(metadata, storage_meta=None)
    with paused_garbage_collection():
        return pickle.dumps(pristine, protocol=_PROTOCOL)[: -len(_STOP)]


def with_storage_meta(storage_meta: StorageMeta | None) -> bytes:
    """Return the bytes that complete a body: they set ``storage_meta`` and end the pickle.

    The opcodes behind the body: an empty dict, the attribute's name, its value, SETITEM, a second BUILD (which
    updates the instance), STOP. The body's last frame ends one byte past the body, at its own STOP; an
    EMPTY_DICT takes that place, so the frame keeps its length and the rest needs no frame.
    """
    name = b"storage_meta"
    attribute = pickle.BINUNICODE + struct.pack("<I", len(name)) + name
    return b"".join(
        (
            pickle.EMPTY_DICT,
            attribute,
            _opcodes(_with_text_id(storage_meta)),
            pickle.SETITEM,
            pickle.BUILD,
            pickle.STOP,
        )
    )


def _with_text_id(storage_meta: StorageMeta | None) -> StorageMeta | None:
    if storage_meta is None or storage_meta.checkpoint_id is None:
        return storage_meta
    return replace(storage_meta, checkpoint_id=str(storage_meta.checkpoint_id))


def _opcodes(value: object) -> bytes:
    """Pickle without frames. It reuses memo indices of the body, which nothing behind the body looks up."""
    return pickle.dumps(value, protocol=2)[len(_PROTO_2) : -len(_STOP)]


class _AllowListUnpickler(pickle.Unpickler):
    """Lends classes to a pickle and takes them back unchanged: its BUILD can set attributes of whatever it gets."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._lent: list[tuple[Any, dict[str, Any]]] = []

    def load_unchanged(self) -> object:
        try:
            return self.load()
        finally:
            if any([_restore(owner, before) for owner, before in reversed(self._lent)]):
                raise PreparedFileError("it changes the classes that it refers to; that was undone")

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "torch" and isinstance(found := vars(torch).get(global_name), torch.dtype):
            return found
        if (module_name, global_name) in METADATA_GLOBALS | PLAN_GLOBALS:
            found = super().find_class(module_name, global_name)
            owners = [found, *found] if isinstance(found, EnumType) else [found]
            self._lent += [(owner, _attributes(owner)) for owner in owners]
            return found if isinstance(found, type) else partial(found)
        raise PreparedFileError(
            f"it refers to {module_name}.{global_name}, which no checkpoint metadata needs; nothing was run. "
            "Use a file that a checkpoint job of yours wrote"
        )


def _attributes(owner: Any) -> dict[str, Any]:
    slots = ("__name__", "__qualname__", "__bases__") if isinstance(owner, type) else ()
    return {**vars(owner), **{name: getattr(owner, name) for name in slots}}


def _restore(owner: Any, before: dict[str, Any]) -> bool:
    """Give ``owner`` the attributes it had, and return whether any was another."""
    now = _attributes(owner)
    added = now.keys() - before.keys()
    changed = [name for name, value in before.items() if not _same(now.get(name), value)]
    for name in added:
        delattr(owner, name)
    for name in changed:
        setattr(owner, name, before[name])
    return bool(added or changed)


def _same(left: object, right: object) -> bool:
    """Identity, since equality could be what was changed; a built-in type makes its name anew each time."""
    return left is right or (type(left) is str and type(right) is str and left == right)


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Loading a million small objects costs three to ten times as much with the collector on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
