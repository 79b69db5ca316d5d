"""Names of megatron.core.dist_checkpointing that are private or moved between releases.

Read in megatron-core 0.17.1, 0.18.2 and 0.19.2. ``tests/test_compat.py`` notices when one of them moves.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
from megatron.core import utils
from megatron.core.dist_checkpointing import save as save_of_release
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from megatron_ckpt_ext.replacements import Replacements

__all__ = [
    "COMMON_STATE",
    "METADATA_JSON",
    "FullyParallelSaveStrategyWrapper",
    "ShardedObject",
    "ShardedTensor",
    "TorchDistSaveShardedStrategy",
    "bytes_to_write",
    "common_beside",
    "ends_in_a_barrier",
    "is_collective_finalizer",
    "is_optional_finalizer",
    "metadata_json",
    "nested_values",
    "refuse_released_storage",
    "save_planner",
    "to_pyt_state_dict",
    "uses_shared_memory",
    "writes_metadata_json",
]

COMMON_STATE = "common_state"
"""Key under which ``dist_checkpointing.save`` puts what is not sharded into the state dict (since 0.19)."""
_LOGGERS = ("onelogger_finalize_fn", "wandb_finalize_fn", "mlflow_finalize_fn", "comet_finalize_fn")
_COLLECTIVE = ("save.<locals>.integrity_finalize_fn", "save_checkpoint.<locals>._post_save_global_barrier")
METADATA_JSON = "metadata.json"
"""Megatron's side file of a ``torch_dist`` checkpoint, which its readers need."""


def to_pyt_state_dict(sharded_state_dict: dict[str, Any], *, keep_only_main_replica: bool) -> dict[str, Any]:
    """Translate Megatron's sharded state dict to torch DCP's; as ``TorchDistSaveShardedStrategy`` does it."""
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica)
    with Replacements() as asked_once:
        # Megatron parses torch's version anew for every tensor, which is a quarter of the time of planning.
        asked_once.apply([(utils, "is_torch_min_version", cache(utils.is_torch_min_version))])
        state_dict: dict[str, Any] = mcore_to_pyt_state_dict(by_key, False)
    return state_dict


def uses_shared_memory(strategy: TorchDistSaveShardedStrategy) -> bool:
    """Whether tensors go to the writer through shared memory; before 0.18 Megatron cannot ask for it."""
    return bool(getattr(strategy, "cpu_shm_mode", False))


def common_beside(state_dict: dict[str, Any]) -> Any | None:
    """Return what is not sharded, where the release keeps it out of the state dict that strategies see.

    Before 0.19 rank 0 writes it to ``common.pt`` before the save is planned; since then it is an item of the state dict
    (``COMMON_STATE``), and ``None`` is returned. The state dict is not changed. No collectives.
    """
    if "common_strategy" not in inspect.signature(save_of_release).parameters:
        return None
    return extract_matching_values(state_dict, _is_not_common)[1]


def _is_not_common(value: Any) -> bool:
    return isinstance(value, ShardedBase | LocalNonpersistentObject)


def bytes_to_write(sharded_state_dict: dict[str, Any]) -> int:
    """Return the bytes of the tensors that this rank writes: its main replicas."""
    shards = (entry for entry in nested_values(sharded_state_dict) if isinstance(entry, ShardedTensor))
    return sum(shard.data.nbytes for shard in shards if shard.data is not None and is_main_replica(shard.replica_id))


def refuse_released_storage(shard: ShardedTensor) -> None:
    """Refuse a tensor whose memory an offload has taken away.

    Raises:
        ValueError: so it is, and this rank writes the tensor.
    """
    data = shard.data
    # No address is what a released storage leaves, and is far cheaper to ask for than the storage.
    if type(data) not in (torch.Tensor, torch.nn.Parameter) or data.data_ptr() or not data.numel():
        return
    if not data.untyped_storage().size() and is_main_replica(shard.replica_id):
        raise ValueError(
            f"the memory of {shard.key} is released, by an offload for instance: bring it back before the save"
        )


def save_planner(*, keep_only_main_replica: bool) -> MCoreSavePlanner:
    """Build the planner of ``TorchDistSaveShardedStrategy``: no flattening, local planning allowed."""
    return MCoreSavePlanner(
        dedup_replicated_tensors=not keep_only_main_replica,
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )


def metadata_json(backend: str, version: int) -> bytes:
    """Return the content of Megatron's side file, as ``dist_checkpointing.core.save_config`` writes it."""
    return json.dumps(asdict(CheckpointingConfig(backend, version))).encode()


def writes_metadata_json(finalizer: Callable[[], Any]) -> bool:
    """Whether it is the finalizer of ``dist_checkpointing.save`` that writes the side file, and a barrier."""
    return getattr(finalizer, "__qualname__", "") == "save.<locals>.metadata_finalize_fn"


def ends_in_a_barrier(finalizer: Callable[[], Any]) -> bool:
    """Whether rank 0 works and then all ranks meet in the default group; work that fails leaves the others there."""
    return writes_metadata_json(finalizer) or is_collective_finalizer(finalizer)


def is_optional_finalizer(finalizer: Callable[[], Any]) -> bool:
    """Whether it only tells a logger about a save (``save_checkpoint`` of Megatron-LM, and of Megatron-Bridge)."""
    owner, _, name = getattr(finalizer, "__qualname__", "").rpartition(".<locals>.")
    return owner == "save_checkpoint" and name in _LOGGERS


def is_collective_finalizer(finalizer: Callable[[], Any]) -> bool:
    """Whether it needs all ranks: ``--verify-integrity``, and the barrier of Bridge's ``save_checkpoint``."""
    return getattr(finalizer, "__qualname__", "") in _COLLECTIVE
