"""The background function of a rank with nothing to write."""

from typing import Any

__all__ = ["write_nothing"]


def write_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing, in the writer process.

    A request without a function is never queued by NVRx (0.6, 0.7), and its poll then never ends; so such a rank
    sends this one.
    """
