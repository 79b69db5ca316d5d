"""The vocabulary of a layout: which item lies where, and what one rank owns of it.

An item is named by its fully qualified name and, for a shard of a tensor, its global offset, as in torch's
``MetadataIndex``; the ``index`` hint of that class takes no part in equality there, and none here.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from megatron_ckpt_ext.errors import PreparedFileError

__all__ = ["Item", "Locator", "Slice", "owner_of", "workers_per_rank"]

_LARGEST_FILE = 1 << 63
_OWNED_FILE = re.compile(r"__(\d+)_(\d+)\.distcp$")
"""Name of a data file: ``[separation hint]__{rank}_{number}.distcp``. The hint stands in front, so match the end."""


class Item(NamedTuple):
    """The name of one item of a checkpoint."""

    fqn: str
    """Fully qualified name in the state dict; an object's carries its shard in it."""
    offset: tuple[int, ...] | None
    """Global offset of the shard, in elements; ``None`` for a non-tensor item."""

    def __str__(self) -> str:
        """Return the name an operator can search for."""
        return self.fqn if self.offset is None else f"{self.fqn} at offset {list(self.offset)}"


class Locator(NamedTuple):
    """Where the bytes of one item lie."""

    path: str
    """File, relative to the checkpoint directory."""
    offset: int
    """First byte in the file."""
    length: int
    """Number of bytes."""

    def __str__(self) -> str:
        """Return file and byte range."""
        return f"{self.path}[{self.offset}:{self.offset + self.length}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """One rank's part of a prepared metadata: what it writes and what it holds."""

    rank: int
    """The rank it belongs to."""
    locators: Mapping[Item, Locator]
    """Every item that lies in this rank's files."""
    held: Mapping[Item, str] | None
    """Description of every item the rank holds, written by it or not; ``None`` where the file does not say."""
    lengths: Mapping[Item, int] = field(default_factory=dict, compare=False)
    """Bare length of each non-tensor item when the layout was made; the rest of its place is head room."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; ``from_json`` is the inverse."""
        held = None if self.held is None else [[i.fqn, i.offset, text] for i, text in self.held.items()]
        return {
            "rank": self.rank,
            "locators": [[i.fqn, i.offset, *locator] for i, locator in self.locators.items()],
            "held": held,
            "lengths": [[i.fqn, length] for i, length in self.lengths.items()],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Slice":
        """Read what ``to_json`` made.

        Raises:
            PreparedFileError: the data has another shape, or a path that leaves the checkpoint directory.
        """
        try:
            held = data["held"]
            check = cache(_check_path)  # a rank has few files and thousands of items
            return cls(
                rank=int(data["rank"]),
                locators={
                    _item(fqn, offset): _checked(check, path, start, length)
                    for fqn, offset, path, start, length in data["locators"]
                },
                held=None if held is None else {_item(fqn, offset): str(text) for fqn, offset, text in held},
                lengths={_item(fqn, None): int(length) for fqn, length in data.get("lengths", ())},
            )
        except PreparedFileError:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise PreparedFileError(f"a rank section has an unexpected form: {error!r}") from error


def checked_locator(path: str, offset: int, length: int) -> Locator:
    """Build a locator from untrusted data.

    Raises:
        PreparedFileError: the path is absolute or leaves the checkpoint directory, or the numbers are no byte range.
    """
    return _checked(_check_path, path, offset, length)


def _check_path(path: str) -> None:
    parts = path.replace("\\", "/").split("/")
    if not path or path.startswith("/") or ".." in parts or "\0" in path:
        raise PreparedFileError(f"the prepared metadata names the file {path!r}, outside the checkpoint directory")


def _checked(check: Callable[[str], None], path: str, offset: int, length: int) -> Locator:
    check(path)
    numbers = isinstance(offset, int) and isinstance(length, int)
    if not (numbers and 0 <= offset <= offset + length < _LARGEST_FILE):
        raise PreparedFileError(f"the prepared metadata has the byte range ({offset!r}, {length!r}) for {path!r}")
    return Locator(path, offset, length)


def owner_of(path: str) -> int | None:
    """Return the rank that writes the file ``path``, or ``None`` if the name does not say."""
    match = _OWNED_FILE.search(path)
    return int(match[1]) if match else None


def workers_per_rank(paths: Iterable[str]) -> int | None:
    """Return the largest number of files that one rank writes, or ``None`` without any such file."""
    numbers = [int(match[2]) for path in paths if (match := _OWNED_FILE.search(path))]
    return max(numbers) + 1 if numbers else None


def _item(fqn: str, offset: list[int] | None) -> Item:
    return Item(str(fqn), None if offset is None else tuple(map(int, offset)))
