"""The structure of a state dict, apart from the values of its tensors."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from megatron_ckpt_ext.compat.dtensor import DTensor
from megatron_ckpt_ext.staging.objects import deep_copy
from megatron_ckpt_ext.staging.tensors import KeyPath, Leaf, Source, is_dense, source_of

__all__ = ["Outline", "outline_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A state dict with a ``Leaf`` in the place of each tensor that has a buffer."""

    state: dict[str, Any]
    sources: tuple[Source, ...]
    """What is to be copied, tied tensors once."""
    items: int
    """Tensors and objects, tied ones each."""

    @property
    def nbytes(self) -> int:
        """Bytes of all sources."""
        return sum(source.nbytes for source in self.sources)

    def filled(self, hosts: Mapping[KeyPath, torch.Tensor]) -> dict[str, Any]:
        """Return the state dict around the buffers of the sources, with copies of all objects.

        Raises:
            StagingError: an object cannot be copied.
        """

        def copied(path: KeyPath, value: object) -> Any:
            return value.around(hosts[value.source.path]) if isinstance(value, Leaf) else deep_copy(path, value)

        return {key: _mapped(value, (key,), copied) for key, value in self.state.items()}


def outline_of(state_dict: Mapping[str, Any]) -> Outline:
    """Read a state dict without copying anything. No collectives but those of a ``Stateful`` in it.

    As in ``torch.distributed.checkpoint``, ``state_dict()`` is called of values of the top level.

    Raises:
        StagingError: a tensor has no values.
    """
    sources: dict[Hashable, Source] = {}
    items = 0

    def leaf(path: KeyPath, value: object) -> Any:
        nonlocal items
        items += 1
        if not (isinstance(value, torch.Tensor) and is_dense(value)):
            return value
        found = source_of(path, value)
        return Leaf(sources.setdefault(found.identity, found), value if isinstance(value, DTensor) else None)

    state = {key: _mapped(_state_of(value), (key,), leaf) for key, value in state_dict.items()}
    return Outline(state=state, sources=tuple(sources.values()), items=items)


def _state_of(value: object) -> object:
    # To ask a tensor whether it is a Stateful takes as long as to copy a small one.
    return value.state_dict() if not isinstance(value, torch.Tensor) and isinstance(value, Stateful) else value


def _mapped(value: object, path: KeyPath, leaf: Callable[[KeyPath, object], Any]) -> Any:
    """Apply ``leaf`` to what dicts, lists and tuples hold. Other mappings become dicts, as a checkpoint has them."""
    if isinstance(value, Mapping):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, _mapped(each, (*path, key), leaf)) for key, each in value.items())
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_mapped(each, (*path, index), leaf) for index, each in enumerate(value))
    return leaf(path, value)
