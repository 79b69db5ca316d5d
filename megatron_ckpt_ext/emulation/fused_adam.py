"""Adam as Transformer Engine and Apex offer it to Megatron: ``step`` lives in the param group.

Megatron's resume with the distributed optimizer expects that layout; torch's own Adam keeps a ``step`` for
each parameter.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["FusedAdam"]


class FusedAdam(torch.optim.Optimizer):
    """Adam (or AdamW with ``adam_w_mode``) on plain tensors, with the constructor and state of the fused one.

    ``capturable`` (for CUDA graphs) has no meaning here.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; each group counts its own steps."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        """One Adam update of ``param`` in place."""
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq = self._moments(param)
        grad = param.grad.to(param.dtype) if param.grad is not None else torch.zeros_like(param)
        if self.adam_w_mode:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            grad = grad.add(param, alpha=group["weight_decay"])
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2 ** group["step"])).add_(group["eps"])
        param.addcdiv_(exp_avg, root, value=-group["lr"] / (1 - beta1 ** group["step"]))

    def _moments(self, param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The running averages of ``param``, zero at first."""
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state["exp_avg"], state["exp_avg_sq"]
