"""Megatron's clean-up of non-persistent checkpoints, where saves begin without a gather."""

import logging
import re
import shutil
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ckpt_ext.compat.dcp import METADATA_FILE

__all__ = ["leaving_complete", "outdated", "remove"]

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"iter_([0-9]+)")


def leaving_complete(stock: Callable[..., Any], is_ours: Callable[[], bool]) -> Callable[..., Any]:
    """Let Megatron's clean-up remove what is older than the newest published checkpoints, where saves are ours.

    It runs on rank 0 at the start of a save, and stock keeps the newest directories. The gathers of a stock save hold
    the other ranks back; in ours one of them may have made the directory of this save by then, and with it in the count
    the only complete checkpoint would go. What is not published yet is not counted, and never removed unless an older
    life of the job left it.

    Args:
        stock: Megatron's.
        is_ours: whether the saves of the running job are.
    """

    @wraps(stock)
    def cleanup_old_non_persistent_checkpoint(save_dir: Any, leave_ckpt_num: int = 1, do_async: bool = False) -> Any:
        if not is_ours():
            return stock(save_dir, leave_ckpt_num=leave_ckpt_num, do_async=do_async)
        if dist.is_initialized() and dist.get_rank() != 0:
            return None
        steps = outdated(Path(save_dir), leave_ckpt_num)
        logger.info("Non-persistent checkpoints scheduled for removal: %s", [str(path) for path in steps])
        if do_async:
            threading.Thread(target=remove, args=(steps,), name="non-persistent clean-up").start()
        else:
            remove(steps)
        return None

    return cleanup_old_non_persistent_checkpoint


def outdated(folder: Path, leave: int) -> list[Path]:
    """Return the checkpoints older than the ``leave`` newest published ones. No collectives.

    One listing, so what appears later is not in it.
    ``.metadata`` is the last file of a checkpoint to appear; to judge the whole would read it, on the trainer's time.
    """
    steps = {path: int(match[1]) for path in folder.glob("iter_*") if (match := _CHECKPOINT.fullmatch(path.name))}
    published = sorted(step for path, step in steps.items() if (path / METADATA_FILE).exists())
    if len(published) < leave:
        return []
    return sorted(path for path, step in steps.items() if step < published[-leave])


def remove(folders: list[Path]) -> None:
    """Remove folders; what cannot be removed is logged. No collectives."""
    for path in folders:
        try:
            shutil.rmtree(path)
        except OSError as error:  # clean-up is not worth a job: the next one tries again
            logger.warning("%s was not removed: %s", path, error)
