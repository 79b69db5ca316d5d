"""Version-dependent and private names that the CPU emulation replaces.

Read in torch 2.14.1 and megatron-core 0.19.2. ``tests/test_emulation.py::test_every_replaced_name_exists``
notices when one moves.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["megatron_optimizer", "torch_cuda_private"]


def torch_cuda_private(*, start: Callable[..., Any], run_when_started: Callable[..., Any]) -> dict[str, object]:
    """Private names of ``torch.cuda``: Megatron's random state tracker imports both at module level."""
    return {"_lazy_init": start, "_lazy_call": run_when_started}


def megatron_optimizer(adam: type[Any]) -> list[tuple[object, str, object]]:
    """The names by which mcore picks its Adam, as they stand when Apex's fused optimizer is installed.

    Without Transformer Engine and Apex mcore takes torch's Adam, whose one ``step`` per parameter fails on
    resume with the distributed optimizer (``assert len(steps) == 1``). Imports Megatron.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    return [
        (optimizer, "Adam", adam),
        (optimizer, "USING_PYTORCH_OPTIMIZER", False),
        (distrib_optimizer, "Adam", adam),
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
        (distrib_optimizer, "USING_TE_OPTIMIZER", False),
        (distrib_optimizer, "USING_APEX_OPTIMIZER", True),
    ]
