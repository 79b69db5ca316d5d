"""Names of megatron.bridge that are looked up where we replace them, or that say what a function is.

Read in megatron-bridge 0.6.2. ``tests/bridge/test_bridge_compat.py`` notices when one of them moves. Needs
megatron-bridge; import it where that is needed only.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from megatron.bridge.training.state import GlobalState

from megatron_ckpt_ext.compat.megatron_sites import Site, find_sites

__all__ = ["DATALOADER_STATES", "SITES", "TRACKERS", "checkpointing", "is_tracker_finalizer", "queue_site", "unmatched"]

_PACKAGE = "megatron.bridge.training"

TRACKERS: Final = ("latest_train_state.pt", "latest_checkpointed_iteration.txt")
"""Files that say which step a job resumes from; the first one decides."""
DATALOADER_STATES: Final = "energon"
"""Folder beside the steps, with a folder for each of them."""


def _during_save(name: str, user: str = "save_checkpoint") -> tuple[tuple[Site]]:
    return ((Site("checkpointing", name, user, _PACKAGE),),)


SITES = {
    "strategy": _during_save("TorchDistSaveShardedStrategy"),
    "wrapper": _during_save("FullyParallelSaveStrategyWrapper"),
    "dist_checkpointing": _during_save("dist_checkpointing"),
    "schedule": _during_save("schedule_async_save"),
    "clean-up": _during_save("cleanup_old_non_persistent_checkpoint"),
    "trackers": _during_save("shutil"),
    "dtensor writer": _during_save("FileSystemWriterAsync"),
    "dtensor plan": _during_save("save_state_dict_async_plan"),
    "dtensor request": _during_save("get_save_and_finalize_callbacks"),
    "dtensor shards": _during_save("preprocess_state_dict_for_uneven_dtensor", "preprocess_fsdp_dtensor_state_dict"),
}
"""What is replaced during a save -> where it is looked up. Those of ``dtensor`` need NVRx, or Megatron-FSDP."""


def checkpointing() -> ModuleType:
    """Return the module whose names are replaced."""
    return SITES["strategy"][0][0].owner


def queue_site() -> Site:
    """Return where a job's queue is chosen; the user is a method of ``GlobalState``."""
    return Site("state", "get_async_strategy", "initialize_async_checkpoint_worker", _PACKAGE)


def unmatched() -> str | None:
    """Say what the installed Bridge does not have and is needed, or ``None``. No collectives."""
    _, missing = find_sites({name: sites for name, sites in SITES.items() if not name.startswith("dtensor")})
    queue = queue_site()
    builder = inspect.unwrap(getattr(GlobalState, queue.user, object))
    if queue.name not in getattr(getattr(builder, "__code__", None), "co_names", ()):
        missing.append(f"queue ({queue})")
    return f"megatron-bridge has no {', no '.join(missing)}" if missing else None


def is_tracker_finalizer(finalizer: Callable[[], Any]) -> bool:
    """Whether it is the finalizer of ``save_checkpoint`` that writes trackers and ``run_config.yaml``, on rank 0."""
    return getattr(finalizer, "__qualname__", "") == "save_checkpoint.<locals>.train_state_finalize_fn"
