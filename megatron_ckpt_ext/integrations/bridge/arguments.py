"""A Bridge configuration, said as Megatron-LM's arguments say it."""

from argparse import Namespace
from typing import Any

import torch.distributed as dist

from megatron_ckpt_ext.compat.msc import megatron_uses_msc
from megatron_ckpt_ext.config import CkptExtConfig

__all__ = ["arguments_of"]


def arguments_of(container: Any) -> Namespace:
    """Read what the package wants to know of a job. No collectives.

    Args:
        container: a Bridge ``ConfigContainer``.

    Returns:
        The names of ``CkptExtConfig``, and those that a fingerprint is read from.
    """
    checkpoint = container.checkpoint
    model = getattr(container.model, "transformer", container.model)
    settings = {name: getattr(checkpoint, name, None) for name in CkptExtConfig.__dataclass_fields__}
    is_dtensors = checkpoint.ckpt_format == "fsdp_dtensor"
    return Namespace(
        **settings
        | {
            "enable_msc": megatron_uses_msc(),
            "world_size": dist.get_world_size() if dist.is_initialized() else None,
            "tensor_model_parallel_size": model.tensor_model_parallel_size,
            "pipeline_model_parallel_size": model.pipeline_model_parallel_size,
            "context_parallel_size": model.context_parallel_size,
            "expert_model_parallel_size": model.expert_model_parallel_size,
            "use_distributed_optimizer": container.optimizer.use_distributed_optimizer,
            "dist_ckpt_optim_fully_reshardable": checkpoint.dist_ckpt_optim_fully_reshardable,
            "use_gloo_process_groups": container.dist.use_gloo_process_groups,
            "dist_ckpt_workers": checkpoint.dist_ckpt_workers if is_dtensors else checkpoint.storage_writers_per_rank,
            "ckpt_assume_constant_structure": True,  # Bridge's number of files does not depend on it
        }
    )
