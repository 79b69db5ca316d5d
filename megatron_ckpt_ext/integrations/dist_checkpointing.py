"""``dist_checkpointing`` as ``megatron.training.checkpointing`` sees it, with a ``save`` that knows our strategies.

Megatron validates each first save of a job with object collectives: that every shard has one writer, and that the
common state is the same everywhere. A save that follows a prepared metadata shows both in its vote (docs/guard.md), so
the validation is left out, for our strategies only and only there: other users of the real module see no change.
"""

import inspect
from types import ModuleType
from typing import Any

from megatron_ckpt_ext.compat.mcore import common_beside
from megatron_ckpt_ext.strategy.fully_parallel import PreparedSaveWrapper
from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

__all__ = ["DistCheckpointing"]


class DistCheckpointing(ModuleType):
    """Everything of the real module, and our ``save``."""

    def __init__(self, real: ModuleType) -> None:
        """Stand in for ``real``."""
        super().__init__(real.__name__, real.__doc__)
        self._real = real
        self._signature = inspect.signature(real.save)

    def __getattr__(self, name: str) -> Any:
        """Find what is not ours in the real module."""
        return getattr(self._real, name)

    def save(self, *args: Any, **options: Any) -> Any:
        """Save as the real module does, without its validation where a vote takes its place. Called on all ranks."""
        call = self._signature.bind(*args, **options).arguments
        strategy = _ours(call.get("sharded_strategy"))
        if strategy is not None and call.get("async_sharded_save"):
            strategy.common_beside = common_beside(call["sharded_state_dict"])
            strategy.preprocess_common = call.get("preprocess_common_before_consistancy_check")
            if strategy.prepared is not None and strategy.handles(call.get("async_strategy") or "nvrx"):
                call["validate_access_integrity"] = False
        return self._real.save(**call)


def _ours(strategy: Any) -> PreparedSaveStrategy | None:
    base = strategy.base_strategy if isinstance(strategy, PreparedSaveWrapper) else strategy
    return base if isinstance(base, PreparedSaveStrategy) else None
