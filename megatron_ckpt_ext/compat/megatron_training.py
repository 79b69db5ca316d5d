"""Names of megatron.training that the integration replaces or reads, and the versions they were read in.

Megatron has no plug-in point for any of this, so names are replaced in the modules that look them up at call time
(read in megatron-core 0.19.2). ``tests/test_compat_training.py`` notices when one of them moves.
"""

from argparse import Namespace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from packaging.version import Version

from megatron_ckpt_ext.metadata.fingerprint import Fingerprint

__all__ = ["fingerprint_of", "unfinalized_saves", "unsupported_reason", "workers_per_rank"]

SUPPORTED_MEGATRON: Final = ("0.19", "0.20")
"""From this version on, and below that one."""
SUPPORTED_NVRX: Final = ("0.7", "0.8")


def unsupported_reason() -> str | None:
    """Say why the installed versions are not supported, or ``None``."""
    import megatron.core

    megatron = Version(megatron.core.__version__)
    if not _within(megatron, SUPPORTED_MEGATRON):
        return _sentence("megatron-core", megatron, SUPPORTED_MEGATRON)
    nvrx = _nvrx_version()
    if nvrx is None:
        return "nvidia-resiliency-ext is not installed"
    if not _within(Version(nvrx), SUPPORTED_NVRX):
        return _sentence("nvidia-resiliency-ext", Version(nvrx), SUPPORTED_NVRX)
    return None


def unfinalized_saves() -> int:
    """Return how many saves are in flight in Megatron's queue. No collectives."""
    from megatron.training import async_utils

    queue = async_utils._async_calls_queue
    return 0 if queue is None else int(queue.get_num_unfinalized_calls())


def workers_per_rank(args: Namespace) -> int:
    """Return how many files each rank writes: Megatron uses several with a constant structure only."""
    return int(args.dist_ckpt_workers) if args.ckpt_assume_constant_structure else 1


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
        workers_per_rank=workers_per_rank(args),
        drops_redundant_extra_state=bool(drops),
        optimizer_sharding=_optimizer_sharding(args),
        torch_version=str(torch.__version__),
        megatron_version=str(megatron.core.__version__),
        nvrx_version=_nvrx_version(),
    )


def _optimizer_sharding(args: Namespace) -> str:
    """As ``checkpointing._build_sharded_state_dict_metadata`` decides it."""
    if not (args.use_distributed_optimizer or getattr(args, "use_layer_wise_distributed_optimizer", False)):
        return "none"
    return "fully_reshardable" if args.dist_ckpt_optim_fully_reshardable else "dp_reshardable"


def _nvrx_version() -> str | None:
    try:
        return version("nvidia-resiliency-ext")
    except PackageNotFoundError:
        return None


def _within(found: Any, bounds: tuple[str, str]) -> bool:
    return bool(Version(bounds[0]) <= found < Version(bounds[1]))


def _sentence(name: str, found: Version, bounds: tuple[str, str]) -> str:
    return f"{name} {found} is not between {bounds[0]} and {bounds[1]}, the versions it was tested with"
