"""Describing items by what decides their bytes and their place in a ``Metadata``: dtype and shapes.

The same text comes from a ``Metadata`` and from the state dict of a save, so both can be compared item by item.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.layout import Item, Locator, checked_locator, owner_of

__all__ = [
    "OBJECT",
    "all_locators",
    "describe_metadata",
    "describe_tensor",
    "item_of",
    "locators_of",
    "merge_descriptions",
    "places_of",
]

OBJECT = "object"
"""The description of every non-tensor item: its length may move with its content."""


def describe_tensor(dtype: torch.dtype, sizes: Sequence[int], global_sizes: Sequence[int]) -> str:
    """Describe one shard: dtype, shape of the shard and of the whole tensor, in elements."""
    return f"{str(dtype).removeprefix('torch.')} {_shape(sizes)} of {_shape(global_sizes)}"


def merge_descriptions(pairs: Iterable[tuple[Item, str]]) -> dict[Item, str]:
    """Collect descriptions; an item that occurs more than once (an empty shard beside a full one) keeps all."""
    described = list(pairs)
    merged = dict(described)
    return merged if len(merged) == len(described) else _merge_repeated(described)


def describe_metadata(metadata: Metadata) -> dict[Item, str]:
    """Describe every item of a checkpoint, whoever wrote it. Cost: all items of the job."""
    return merge_descriptions(
        pair for fqn, entry in metadata.state_dict_metadata.items() for pair in _describe_entry(fqn, entry)
    )


def item_of(index: MetadataIndex) -> Item:
    """Return the name of a torch ``MetadataIndex``."""
    return Item(index.fqn, index.offset)


def places_of(results: Iterable[WriteResult]) -> dict[Item, Locator]:
    """Return where each item went that was written."""
    return {
        item_of(result.index): Locator(
            result.storage_data.relative_path, result.storage_data.offset, result.storage_data.length
        )
        for result in results
    }


def locators_of(metadata: Metadata, rank: int) -> dict[Item, Locator]:
    """Return what a checkpoint's metadata places in the files of one rank; raises as ``all_locators``."""
    return {item: locator for item, locator in all_locators(metadata).items() if owner_of(locator.path) == rank}


def all_locators(metadata: Metadata) -> dict[Item, Locator]:
    """Return what a checkpoint's metadata places where.

    Raises:
        PreparedFileError: a path leaves the checkpoint directory, or tells no rank; nobody's guard would ever look at
            what lies there.
    """
    located = {
        item_of(index): checked_locator(info.relative_path, info.offset, info.length)
        for index, info in metadata.storage_data.items()
    }
    if nobodys := [path for path in {each.path for each in located.values()} if owner_of(path) is None]:
        raise PreparedFileError(f"the file name {min(nobodys)!r} does not tell which rank writes it")
    return located


def _merge_repeated(described: Iterable[tuple[Item, str]]) -> dict[Item, str]:
    texts: dict[Item, list[str]] = {}
    for item, text in described:
        texts.setdefault(item, []).append(text)
    return {item: " + ".join(sorted(several)) for item, several in texts.items()}


def _describe_entry(fqn: str, entry: object) -> Iterable[tuple[Item, str]]:
    if not isinstance(entry, TensorStorageMetadata):
        return ((Item(fqn, None), OBJECT),)
    return (
        (Item(fqn, tuple(chunk.offsets)), describe_tensor(entry.properties.dtype, chunk.sizes, entry.size))
        for chunk in entry.chunks
    )


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(str(size) for size in sizes) or "scalar"
