"""Megatron's clean-up of non-persistent checkpoints, where saves begin without a gather."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ckpt_ext.compat.dcp import METADATA_FILE

__all__ = ["CLEAN_UP", "leaving_complete"]

CLEAN_UP = "cleanup_old_non_persistent_checkpoint"
_PREFIX = "iter_"


def leaving_complete(stock: Callable[..., Any], is_ours: Callable[[], bool]) -> Callable[..., Any]:
    """Let Megatron's clean-up count from the newest published checkpoint on, and not from one that is being written.

    It runs on rank 0 at the start of a save and keeps the newest directories. The gathers of a stock save hold the
    other ranks back; in ours one of them may have made the directory of this save by then, and with it in the count
    the only complete checkpoint would go.

    Args:
        stock: Megatron's.
        is_ours: whether the saves of the running job are.
    """

    @wraps(stock)
    def cleanup_old_non_persistent_checkpoint(save_dir: Any, leave_ckpt_num: int = 1, do_async: bool = False) -> Any:
        if is_ours() and (not dist.is_initialized() or dist.get_rank() == 0):
            leave_ckpt_num += _unpublished(Path(save_dir))
        return stock(save_dir, leave_ckpt_num=leave_ckpt_num, do_async=do_async)

    return cleanup_old_non_persistent_checkpoint


def _unpublished(folder: Path) -> int:
    """Number of checkpoints newer than the newest published one, found as Megatron finds them.

    ``.metadata`` is the last file of a checkpoint to appear; to judge the whole would read it, on the trainer's time.
    """
    published = {
        int(path.name.removeprefix(_PREFIX)): (path / METADATA_FILE).exists() for path in folder.rglob(f"{_PREFIX}*")
    }
    newest = max((step for step, is_published in published.items() if is_published), default=-1)
    return sum(step > newest for step in published)
