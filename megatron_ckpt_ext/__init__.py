"""Asynchronous Megatron checkpoints without object gathers.

This module owns the public names. Each is imported when it is first asked for, so that
`import megatron_ckpt_ext` and the offline commands need neither torch nor Megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from megatron_ckpt_ext.commit.failures import MetadataReuseError, SaveFailedError, WriteFailedError
    from megatron_ckpt_ext.commit.finalize import save_state_dict_async_finalize
    from megatron_ckpt_ext.commit.queue import AsyncSaveQueue
    from megatron_ckpt_ext.integrations.megatron_lm import install
    from megatron_ckpt_ext.manager.config import ManagerConfig
    from megatron_ckpt_ext.manager.manager import CheckpointManager
    from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
    from megatron_ckpt_ext.plan.async_plan import save_state_dict_async_plan
    from megatron_ckpt_ext.publish.completeness import verify_checkpoint
    from megatron_ckpt_ext.publish.latest import latest_complete_step
    from megatron_ckpt_ext.strategy.fsdp_dtensor import FsdpDtensorSaver, save_fsdp_dtensor
    from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

__version__ = "0.1.0"

__all__ = [
    "AsyncSaveQueue",
    "CheckpointManager",
    "FsdpDtensorSaver",
    "ManagerConfig",
    "MetadataReuseError",
    "PreparedMetadata",
    "PreparedSaveStrategy",
    "SaveFailedError",
    "WriteFailedError",
    "install",
    "latest_complete_step",
    "save_fsdp_dtensor",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
    "verify_checkpoint",
]

_HOMES: Final = {
    "AsyncSaveQueue": "commit.queue",
    "CheckpointManager": "manager.manager",
    "FsdpDtensorSaver": "strategy.fsdp_dtensor",
    "ManagerConfig": "manager.config",
    "MetadataReuseError": "commit.failures",
    "SaveFailedError": "commit.failures",
    "WriteFailedError": "commit.failures",
    "PreparedMetadata": "metadata.prepared",
    "PreparedSaveStrategy": "strategy.torch_dist",
    "install": "integrations.megatron_lm",
    "latest_complete_step": "publish.latest",
    "save_fsdp_dtensor": "strategy.fsdp_dtensor",
    "save_state_dict_async_finalize": "commit.finalize",
    "save_state_dict_async_plan": "plan.async_plan",
    "verify_checkpoint": "publish.completeness",
}


if not TYPE_CHECKING:  # a type checker that sees __getattr__ takes every misspelt name for a public one

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
