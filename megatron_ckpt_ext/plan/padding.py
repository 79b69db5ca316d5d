"""Filling every non-tensor item of a save up to its slot, between planning and writing. No collectives."""

import io
from typing import Any

from megatron_ckpt_ext.metadata.items import item_of
from megatron_ckpt_ext.metadata.layout import Item
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.metadata.slots import padded, slot_size

__all__ = ["pad_non_tensor_items"]


def pad_non_tensor_items(storage_writer: Any, prepared: PreparedMetadata | None) -> dict[Item, int]:
    """Pad in place what the writer is about to write.

    An item that the layout knows fills its slot there. A new one, or one that outgrew its slot, gets a new slot with
    head room, so that the layout that is made from this save has it. What is no archive stays as it is.

    Args:
        storage_writer: NVRx ``FileSystemWriterAsync`` after ``prepare_write_data``.
        prepared: the layout that the save follows; ``None`` if it makes a new one.

    Returns:
        Item -> its bare length in bytes; what is missing to its slot is head room.
    """
    from megatron_ckpt_ext.compat.nvrx import non_tensor_items  # planning must work without NVRx

    items, data = non_tensor_items(storage_writer)
    lengths = {}
    for number, (write, stream) in enumerate(zip(items, data, strict=True)):
        item, archive = item_of(write.index), bytes(stream.getbuffer())
        lengths[item] = len(archive)
        data[number] = io.BytesIO(_in_slot(archive, item, prepared))
    return lengths


def _in_slot(archive: bytes, item: Item, prepared: PreparedMetadata | None) -> bytes:
    locator = None if prepared is None else prepared.slice.locators.get(item)
    filled = None if locator is None else padded(archive, locator.length)
    return filled or padded(archive, slot_size(len(archive))) or archive
