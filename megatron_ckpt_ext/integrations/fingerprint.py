"""The fingerprint of a Megatron job, read from its arguments."""

from argparse import Namespace

import torch

from megatron_ckpt_ext.compat.megatron_training import nvrx_version
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint

__all__ = ["files_per_rank", "fingerprint_of", "optimizer_sharding", "set_defaults"]

_DEFAULTS = {"dist_ckpt_workers": 1, "enable_msc": False}
"""Arguments of saves that a Megatron, or a configuration made for another one, may lack."""


def fingerprint_of(args: Namespace) -> Fingerprint:
    """Read the fingerprint of a job from its validated arguments. No collectives."""
    import megatron.core

    drops = getattr(args, "ckpt_drop_redundant_extra_state", getattr(args, "drop_redundant_extra_state", False))
    return Fingerprint(
        world_size=args.world_size,
        tensor_parallel=args.tensor_model_parallel_size,
        pipeline_parallel=args.pipeline_model_parallel_size,
        context_parallel=args.context_parallel_size,
        expert_parallel=args.expert_model_parallel_size,
        ckpt_format=args.ckpt_format,
        workers_per_rank=files_per_rank(args),
        drops_redundant_extra_state=bool(drops),
        optimizer_sharding=optimizer_sharding(args),
        torch_version=str(torch.__version__),
        megatron_version=str(megatron.core.__version__),
        nvrx_version=nvrx_version(),
    )


def files_per_rank(args: Namespace) -> int:
    """Return how many files each rank writes; 1 if the arguments do not say.

    With ``torch_dist`` Megatron uses several with a constant structure only; ``fsdp_dtensor`` does not need one.
    """
    is_dtensors = getattr(args, "ckpt_format", None) == "fsdp_dtensor"
    several = is_dtensors or getattr(args, "ckpt_assume_constant_structure", False)
    workers = getattr(args, "dist_ckpt_workers", None) if several else None
    return _DEFAULTS["dist_ckpt_workers"] if workers is None else int(workers)


def set_defaults(args: Namespace) -> None:
    """Give Megatron, which reads them in every save, the arguments of saves that the job lacks. No collectives."""
    for name, value in _DEFAULTS.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def optimizer_sharding(args: Namespace) -> str:
    """Name how the optimizer is sharded, as ``checkpointing._build_sharded_state_dict_metadata`` decides it."""
    if not (args.use_distributed_optimizer or getattr(args, "use_layer_wise_distributed_optimizer", False)):
        return "none"
    return "fully_reshardable" if args.dist_ckpt_optim_fully_reshardable else "dp_reshardable"
