"""Refusing optimizer state that a checkpoint cannot hold: one rank's part of it, in a tensor that says it is the whole.

An optimizer that does not know DTensors makes the state of a sharded parameter with the shape of the local shard. Saved
as it is, one rank's part would be taken for everybody's.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.plan.dtensor_holdings import Entry

__all__ = ["refuse_plain_optimizer_state"]

_STATE = "state"
"""What optimizers, torch's ``get_optimizer_state_dict`` and Megatron call the part with one entry a parameter."""
_STEP = "step"
"""A count, which some optimizers keep in a tensor of one dimension."""
_REMEDY = "Use an optimizer that makes its state as DTensors"


def refuse_plain_optimizer_state(entries: Sequence[Entry]) -> None:
    """Look for a plain tensor in ``state.<parameter>.<name>`` with the shape of a DTensor that is its parameter.

    Its parameter is a DTensor whose key ends in the parameter's name, or the other way round; or any DTensor in the
    same entry. As many elements as this rank has of it are its shard in any shape: some optimizers flatten.
    A number, as in torch's ``Optimizer.state_dict``, may be any parameter, so the shape of any shard is refused.
    Scalars, and tensors with a shape of their own (quantization maps), are what they say they are. No collectives.

    Raises:
        ConfigurationError: there is one; with its key.
    """
    plain = [entry for entry in entries if entry.spread is None and entry.sizes and _owner(entry.key)]
    if not plain:
        return
    by_name, siblings = _by_name(entries), _siblings(entries)
    parts = {entry.sizes: entry for entry in entries if _is_part(entry)}
    for entry in plain:
        owner = _owner(entry.key) or ""
        for tensor in (*siblings[_entry_of(entry.key)], *_parameters(owner, by_name)):
            if entry.sizes in (tensor.sizes, tensor.shape) or _is_flattened(entry, tensor):
                raise ConfigurationError(f"{_sentence(entry, tensor)}. {_REMEDY}")
        if owner.isdigit() and entry.sizes in parts:
            raise ConfigurationError(
                f"{_sentence(entry, parts[entry.sizes])}. {_REMEDY}, or torch's get_optimizer_state_dict, which names "
                "the parameters"
            )


def _sentence(entry: Entry, tensor: Entry) -> str:
    return (
        f"{entry.key} is a plain tensor of shape {list(entry.sizes)}, and {tensor.key} is a DTensor of shape "
        f"{list(tensor.shape)}, {list(tensor.sizes)} of it on this rank: one rank's part would be saved as that of all"
    )


def _is_part(tensor: Entry) -> bool:
    return tensor.is_sharded and tensor.sizes != tensor.shape


def _is_flattened(entry: Entry, tensor: Entry) -> bool:
    """Whether it has as many elements as this rank has of the tensor; one alone is a scalar of many optimizers."""
    return _is_part(tensor) and 1 < math.prod(entry.sizes) == math.prod(tensor.sizes)


def _owner(key: str) -> str | None:
    """The parameter that an optimizer's entry is of; ``None``: the key is none of an optimizer's state."""
    parts = key.split(".")
    if _STATE not in parts[:-2] or parts[-1] == _STEP:
        return None
    return ".".join(parts[parts.index(_STATE) + 1 : -1])


def _entry_of(key: str) -> str:
    return key.rpartition(".")[0]


def _siblings(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.spread is not None:
            found[_entry_of(entry.key)].append(entry)
    return found


def _by_name(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """DTensors by every name that their keys end in."""
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.spread is not None:
            for name in _endings(entry.key):
                found[name].append(entry)
    return found


def _parameters(owner: str, by_name: dict[str, list[Entry]]) -> Iterator[Entry]:
    yield from by_name.get(owner, ())
    for name in _endings(owner):
        yield from (entry for entry in by_name.get(name, ()) if entry.key == name)


def _endings(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))
