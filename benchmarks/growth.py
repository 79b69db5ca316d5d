"""Telling a leak from what allocators do: how the memory of a process goes on over many saves. Pure functions."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

__all__ = ["MORE_THAN_STOCK", "RISE", "Growth"]

MORE_THAN_STOCK = 64 << 10
"""Bytes a save by which a leak grows faster than stock."""
RISE = 1 << 20
"""Bytes by which the last third of a leak lies above its middle third. A step that an allocator takes early is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Bytes of resident memory over the saves of the steady state."""

    slope: float
    """Of the least-squares line, per save."""
    rise: float
    """From the median of the middle third to that of the last."""

    @classmethod
    def of(cls, resident: Sequence[float]) -> Self:
        """Look at the bytes after each save, three at least."""
        third = len(resident) // 3
        return cls(
            slope=statistics.linear_regression(range(len(resident)), resident).slope,
            rise=statistics.median(resident[-third:]) - statistics.median(resident[-2 * third : -third]),
        )

    def is_leak(self, stock: "Growth") -> bool:
        """Whether it grows, and faster than ``stock`` did in the same run, and to the end."""
        return self.slope > max(0.0, stock.slope + MORE_THAN_STOCK) and self.rise > RISE
