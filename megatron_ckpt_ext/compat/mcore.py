"""Names of megatron.core.dist_checkpointing that are private or moved between releases.

Read in megatron-core 0.19.2. ``tests/test_compat.py`` notices when one of them moves.
"""

from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

__all__ = [
    "ShardedObject",
    "ShardedTensor",
    "TorchDistSaveShardedStrategy",
    "nested_values",
    "save_planner",
    "to_pyt_state_dict",
]


def to_pyt_state_dict(sharded_state_dict: dict[str, Any], *, keep_only_main_replica: bool) -> dict[str, Any]:
    """Translate Megatron's sharded state dict to torch DCP's; as ``TorchDistSaveShardedStrategy`` does it."""
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica)
    state_dict: dict[str, Any] = mcore_to_pyt_state_dict(by_key, False)
    return state_dict


def save_planner(*, keep_only_main_replica: bool) -> MCoreSavePlanner:
    """Build the planner of ``TorchDistSaveShardedStrategy``: no flattening, local planning allowed."""
    return MCoreSavePlanner(
        dedup_replicated_tensors=not keep_only_main_replica,
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )
