"""Names of items as an indented tree."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megatron_ckpt_ext.cli.output import byte_text

__all__ = ["tree_lines"]


@dataclass
class _Node:
    bytes: int = 0
    items: int = 0
    below: dict[str, "_Node"] = field(default_factory=dict)


def tree_lines(items: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Write names, split at their dots, below each other, each with the items and bytes below it.

    Args:
        items: name and bytes.
    """
    root = _Node()
    for name, size in items:
        node = root
        for part in name.split(" at offset ")[0].split("."):
            node = node.below.setdefault(part, _Node())
            node.bytes += size
            node.items += 1
    yield from _lines(root, 0)


def _lines(node: _Node, depth: int) -> Iterator[str]:
    for name, below in node.below.items():
        yield f"{'  ' * depth}{name}  ({below.items} items, {byte_text(below.bytes)})"
        yield from _lines(below, depth + 1)
