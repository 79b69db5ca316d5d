"""What this rank's writer did, as plain data. No collectives."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.compat.dcp import is_wrapped_exception
from megatron_ckpt_ext.metadata.items import item_of
from megatron_ckpt_ext.metadata.layout import Item, Locator, Slice

__all__ = ["follows", "retrieve_results", "written_items"]


def retrieve_results(storage_writer: Any) -> tuple[Sequence[WriteResult], str | None]:
    """Take the write results from the writer; can be done once a save.

    Args:
        storage_writer: an NVRx ``FileSystemWriterAsync`` whose background function has ended.

    Returns:
        The results, and the cause in one sentence if writing failed.
    """
    try:
        results = storage_writer.retrieve_write_results()
    except Exception as error:  # a failure here must become a vote: the peers are on their way to the reduction
        return [], f"{type(error).__name__}: {error}"
    if is_wrapped_exception(results):
        return [], str(results[0])
    return results, None


def follows(expected: Slice, results: Sequence[WriteResult]) -> bool:
    """Whether results equal a slice item by item, in the order in which it was recorded.

    What nearly every save does; it allocates nothing, where ``written_items`` makes two objects an item. A ``False``
    may be another order: ``find_layout_drift`` decides.
    """
    if len(results) != len(expected.locators):
        return False
    for (item, locator), result in zip(expected.locators.items(), results, strict=True):
        index, info = result.index, result.storage_data
        if index.fqn != item[0] or index.offset != item[1]:
            return False
        if info.relative_path != locator[0] or info.offset != locator[1] or info.length != locator[2]:
            return False
    return True


def written_items(results: Sequence[WriteResult]) -> dict[Item, Locator]:
    """Return where each item of this rank went."""
    return {
        item_of(result.index): Locator(
            result.storage_data.relative_path, result.storage_data.offset, result.storage_data.length
        )
        for result in results
    }
