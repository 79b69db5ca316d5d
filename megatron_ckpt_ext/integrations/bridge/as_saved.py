"""``StateAsSaved``: the state of training as it was when a save began, for what runs when it ends."""

from copy import copy
from typing import Any

__all__ = ["StateAsSaved"]


class StateAsSaved:
    """Stands in for a ``GlobalState`` during one save; its ``train_state`` stays what it was.

    Bridge tells loggers and callbacks of an asynchronous save about ``state.train_state`` when the save has ended, and
    that is some steps further by then. Everything else is the real state's.
    """

    def __init__(self, state: Any) -> None:
        """Keep the state, and a copy of what is counted in it. No collectives."""
        vars(self).update(_state=state, train_state=copy(state.train_state))

    def __getattr__(self, name: str) -> Any:
        """Find what is not kept in the real state."""
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set it in the real state."""
        setattr(self._state, name, value)
