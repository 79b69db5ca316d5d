"""Checking that what every rank holds, and only one rank writes, is the same on all of them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ckpt_ext.metadata.digest import combined_digest, digests_by_key

__all__ = ["CommonState", "CommonStateCheck"]

logger = logging.getLogger(__name__)


class CommonStateCheck:
    """The check of one job. As in Megatron, a difference is a warning: rank 0's state is what is saved.

    It is named once a job, since naming it needs an object collective.
    """

    def __init__(self) -> None:
        """Have seen no difference."""
        self.reported = False

    def of(self, state: Mapping[str, Any]) -> "CommonState | None":
        """Digest the common state of one save. No collectives; ``None`` after a difference was reported."""
        return None if self.reported else CommonState(self, digests_by_key(state))


@dataclass(frozen=True, slots=True)
class CommonState:
    """The common state of one save on this rank, as digests."""

    check: CommonStateCheck
    """Of the job."""
    digests: Mapping[str, int]
    """Key -> digest."""

    def vote(self) -> int:
        """Return the one number that this rank puts into the vote."""
        return combined_digest(self.digests)

    def report(self, wrapper: Any) -> None:
        """Name what differs. Called on all ranks: one all_gather_object."""
        self.check.reported = True
        by_rank: list[Mapping[str, int]] = wrapper.all_gather_object(dict(self.digests))
        if wrapper.is_coordinator:
            logger.warning(
                "The common state of the checkpoint differs between ranks, that of rank 0 is saved: %s.",
                "; ".join(_differences(by_rank)),
            )


def _differences(by_rank: list[Mapping[str, int]]) -> list[str]:
    first = by_rank[0]
    found = []
    for rank, digests in enumerate(by_rank[1:], start=1):
        keys = sorted(key for key in first.keys() | digests.keys() if first.get(key) != digests.get(key))
        if keys:
            found.append(f"rank {rank} differs in {', '.join(keys[:5])}" + (" and more" if len(keys) > 5 else ""))
    return found
