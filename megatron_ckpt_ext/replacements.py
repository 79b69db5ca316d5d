"""Names that stand in for others until they are put back."""

from collections.abc import Iterable
from typing import Self

__all__ = ["Replacement", "Replacements"]


type Replacement = tuple[object, str, object]
"""A module or class, a name in it, and what that name shall be."""


class Replacements:
    """A context that remembers the originals of what is replaced in it, and puts them back when it is left."""

    def __init__(self) -> None:
        self._originals: list[Replacement] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._originals:
            setattr(*self._originals.pop())

    def apply(self, replacements: Iterable[Replacement]) -> None:
        """Set every name; one that its owner lacks in the installed version stays absent."""
        for owner, name, value in replacements:
            if hasattr(owner, name):
                self._originals.append((owner, name, getattr(owner, name)))
                setattr(owner, name, value)
