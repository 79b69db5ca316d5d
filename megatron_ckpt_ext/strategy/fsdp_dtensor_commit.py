"""The end of a save whose shards may have any size: when the layout is made anew, so are their offsets."""

from collections.abc import Sequence
from typing import Any

from megatron_ckpt_ext.commit.commit import Committed, SaveCommit
from megatron_ckpt_ext.commit.failures import WriteFailedError
from megatron_ckpt_ext.commit.status import Outcome
from megatron_ckpt_ext.plan.dtensor_exchange import ExchangeError, agree_on_offsets, resettled
from megatron_ckpt_ext.plan.dtensor_holdings import Entry

__all__ = ["SettlingCommit"]


class SettlingCommit(SaveCommit):
    """A ``SaveCommit`` that finds out in a rebuild where uneven shards lie, before the layout is made of them.

    A rank whose own shard is as it was cannot know that one in front of it has grown.
    """

    def __init__(self, *args: Any, uneven: Sequence[Entry] | None, **options: Any) -> None:
        """Prepare the end of a save. No collectives.

        Args:
            *args: of ``SaveCommit``.
            uneven: what this rank holds of tensors with uneven shards; ``None``, on all ranks: there are none in this
                job.
            **options: of ``SaveCommit``.
        """
        super().__init__(*args, **options)
        self._uneven = uneven

    def _make_layout(self, outcome: Outcome) -> Committed:
        """Called on all ranks; in a rebuild first one gather_object and one scatter_object_list."""
        if self._uneven is not None and self._prepared is not None:
            self._settle(self._uneven)
        return super()._make_layout(outcome)

    def _settle(self, uneven: Sequence[Entry]) -> None:
        def entries() -> Sequence[Entry]:
            self._written()
            return uneven

        try:
            offsets = agree_on_offsets(entries, self._wrapper)
        except ExchangeError as error:
            raise WriteFailedError(error.causes) from None
        self._planned, self._results = resettled(self._planned, self._written(), offsets)
