"""What is compared in ``flags_unset.py``: plain data, for the script and its training job."""

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["AGAIN", "INSTALLED", "KINDS", "STOCK", "Block", "blocks_of"]

STOCK, AGAIN, INSTALLED = "stock", "stock again", "installed"
KINDS = (STOCK, AGAIN, INSTALLED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Iterations and saves on one rank, or on the slowest of each."""

    kind: str
    """One of ``KINDS``."""
    wall: float
    """Seconds of the whole block, until its last save was published."""
    cpu: float
    """Seconds of the training thread in it."""
    save_call: float
    """Mean of the seconds that Megatron's save kept the training thread."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def blocks_of(rounds: int) -> list[str]:
    """Return the kinds in the order in which they run: each round has all, each kind comes first equally often."""
    turned = (KINDS[number % len(KINDS) :] + KINDS[: number % len(KINDS)] for number in range(rounds))
    return [kind for order in turned for kind in order]
