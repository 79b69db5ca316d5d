"""Where the shards of a tensor lie whose sizes follow no rule: by adding up the sizes of those before them.

Megatron-FSDP cuts its buffers, not its tensors, so neither mesh nor placements tell how much of a tensor a rank has.
Pure functions. A rank without the key has none of the tensor: an optimizer without state for its empty shard leaves it
out.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from megatron_ckpt_ext.plan.dtensor_holdings import Entry, Spread

__all__ = ["DisagreementError", "offsets_of"]

type Offset = tuple[int, ...]


class DisagreementError(ValueError):
    """The ranks do not hold the parts of one tensor."""


class _Part(NamedTuple):
    rank: int
    entry: Entry
    spread: Spread


def offsets_of(held: Iterable[tuple[int, Entry]]) -> dict[int, dict[str, Offset]]:
    """Return rank -> key -> offset of all shards of all DTensors.

    Args:
        held: every rank's entries; those of no DTensor are passed over.

    Raises:
        DisagreementError: the shards of a tensor do not make up the tensor; with its key and ranks.
    """
    tensors: dict[tuple[str, str], list[_Part]] = defaultdict(list)
    for rank, entry in held:
        if entry.spread is not None:
            tensors[entry.key, entry.spread.ranks].append(_Part(rank, entry, entry.spread))
    offsets: dict[int, dict[str, Offset]] = defaultdict(dict)
    for (key, _), parts in tensors.items():
        _check_alike(key, parts)
        for rank, offset in _offsets(key, parts).items():
            offsets[rank][key] = offset
    return offsets


def _check_alike(key: str, parts: list[_Part]) -> None:
    first = parts[0]
    for part in parts:
        if (part.entry.dtype, part.entry.shape, part.spread.shards, part.spread.order) != (
            first.entry.dtype,
            first.entry.shape,
            first.spread.shards,
            first.spread.order,
        ):
            raise DisagreementError(
                f"{key} is {_text(first)} on rank {first.rank} and {_text(part)} on rank {part.rank}: the ranks of a "
                "mesh must hold parts of the same tensor"
            )


def _offsets(key: str, parts: list[_Part]) -> dict[int, Offset]:
    found = {part.rank: [0] * len(part.entry.shape) for part in parts}
    for dim in {each for each in parts[0].spread.shards if each is not None}:
        for rank, start in _starts(key, dim, parts).items():
            found[rank][dim] = start
    return {rank: tuple(offset) for rank, offset in found.items()}


def _starts(key: str, dim: int, parts: list[_Part]) -> dict[int, int]:
    """Add up along one tensor dimension, apart for every place in the mesh dimensions that shard the others."""
    lines: dict[tuple[int, ...], dict[tuple[int, ...], list[_Part]]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        along, across = _position(part.spread, dim)
        lines[across][along].append(part)
    starts: dict[int, int] = {}
    for line in lines.values():
        end = 0
        for along in sorted(line):
            replicas = line[along]
            starts.update((part.rank, end) for part in replicas)
            end += _size(key, dim, replicas)
        whole = parts[0].entry.shape[dim]
        if end != whole and 0 not in parts[0].entry.shape:
            ranks = sorted(part.rank for replicas in line.values() for part in replicas)
            raise DisagreementError(
                f"the shards of {key} have {end} of {whole} elements in dimension {dim}, on the ranks "
                f"{_listed(ranks)}: every rank with a part of it must have it in its state dict"
            )
    return starts


def _position(spread: Spread, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Coordinates in the mesh dimensions that shard ``dim``, outermost first, and in those that shard another."""
    along = tuple(spread.coordinate[m] for m in reversed(spread.order) if spread.shards[m] == dim)
    across = tuple(
        at for m, at in enumerate(spread.coordinate[: len(spread.shards)]) if spread.shards[m] not in (None, dim)
    )
    return along, across


def _size(key: str, dim: int, replicas: list[_Part]) -> int:
    sizes = {part.entry.sizes[dim] for part in replicas}
    if len(sizes) > 1:
        ranks = sorted(part.rank for part in replicas)
        raise DisagreementError(f"the replicas of {key} have different sizes on the ranks {_listed(ranks)}")
    return sizes.pop()


def _text(part: _Part) -> str:
    shape = "x".join(map(str, part.entry.shape))
    return f"a {str(part.entry.dtype).removeprefix('torch.')} {shape} sharded as {part.spread.shards}"


def _listed(ranks: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return f"{shown} and {len(ranks) - most} more" if len(ranks) > most else shown
