"""Bridge's ``most_recent_k``: what is complete and newest stays, whatever is in flight."""

import logging
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ckpt_ext.compat.bridge import DATALOADER_STATES
from megatron_ckpt_ext.integrations.non_persistent import outdated, remove

__all__ = ["keeping_complete"]

logger = logging.getLogger(__name__)


def keeping_complete(stock: Callable[..., Any], is_ours: Callable[[], bool]) -> Callable[..., Any]:
    """Wrap Bridge's clean-up, where saves are ours: it counts published steps, and removes only older ones.

    Bridge counts every ``iter_*`` below the directory, the step that is being written and the state of the data loader
    (``energon/iter_*``) as well, so that with ``most_recent_k=1`` the only complete checkpoint goes while the next one
    is in flight, and with ``most_recent_k=0`` the one that has just been written. Here the newest published one stays.
    The data loader's state goes with its step.

    Args:
        stock: Bridge's.
        is_ours: whether the saves of the running job are.
    """

    @wraps(stock)
    def cleanup_old_non_persistent_checkpoint(
        save_dir: Any, leave_ckpt_num: int = 1, do_async: bool = False, **options: Any
    ) -> Any:
        if not is_ours():
            return stock(save_dir, leave_ckpt_num, do_async, **options)
        if dist.is_initialized() and dist.get_rank() != 0:
            return None
        folder = Path(save_dir)
        steps = outdated(folder, max(1, leave_ckpt_num))
        logger.info("Checkpoints scheduled for removal: %s", [str(path) for path in steps])
        states = [state for path in steps if (state := folder / DATALOADER_STATES / path.name).exists()]
        if do_async:
            threading.Thread(target=remove, args=([*steps, *states],), name="checkpoint clean-up").start()
        else:
            remove([*steps, *states])
        return None

    return cleanup_old_non_persistent_checkpoint
