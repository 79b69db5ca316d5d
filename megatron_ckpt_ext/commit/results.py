"""What this rank's writer did, as plain data. No collectives."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.compat.dcp import is_wrapped_exception

__all__ = ["retrieve_results"]


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
