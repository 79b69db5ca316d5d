"""What is compared with what in ``drift_save.py``: plain data, for the script and its ranks."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Phases", "Side", "State", "rotated"]


class Side(StrEnum):
    """One way to save."""

    STOCK = "stock, plans every save"
    """The only right one for stock if the state may change."""
    STOCK_CONSTANT = "stock, constant structure"
    """``--ckpt-assume-constant-structure``: from the third save on it reuses its plan, right or wrong."""
    DRIFT = "ours, drifts: rebuilt"
    """Every save differs from the one before."""
    REUSE = "ours, follows the layout"
    """The steady state."""

    @property
    def is_stock(self) -> bool:
        """Whether stock megatron-core and NVRx save."""
        return self in (Side.STOCK, Side.STOCK_CONSTANT)

    @property
    def drifts(self) -> bool:
        """Whether the state changes with every save; that of the stock save to compare with as well."""
        return self in (Side.STOCK, Side.DRIFT)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What each rank holds and writes."""

    tensors: int
    elements: int
    """Of each tensor, float32."""
    items: int
    """Non-tensor items."""
    replicated: int = 0
    """Tensors that every rank holds and one of them writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Seconds of one save on one rank."""

    plan: float
    """The call of ``dist_checkpointing.save``."""
    write: float
    """Staging, writing, and waiting for the other ranks."""
    finalize: float
    """From the barrier behind the write to the published checkpoint."""
    cpu: float
    """Of ``whole``: what the calling thread computed. The rest is waiting."""

    @property
    def whole(self) -> float:
        """From the call to the published checkpoint."""
        return self.blocking + self.write

    @property
    def blocking(self) -> float:
        """Planning and finalizing, which an asynchronous save does in the training thread."""
        return self.plan + self.finalize


def rotated(number: int) -> list[Side]:
    """Return the sides in the order of round ``number``: each is first, second, ... equally often."""
    sides = list(Side)
    first = number % len(sides)
    return sides[first:] + sides[:first]
