"""How the offline commands answer: JSON on request, tables on a terminal, plain lines elsewhere."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = ["FOUND", "GOOD", "add_json", "byte_text", "lines", "print_json", "table", "tracked"]

GOOD, FOUND = 0, 1
"""Exit codes: nothing to complain about; something was found. 2 is for bad input."""


def add_json(parser: Any) -> None:
    """Let a command take ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def print_json(document: dict[str, Any]) -> None:
    """Print the answer for a program."""
    json.dump(document, sys.stdout, indent=2, default=str)
    print()


def lines(texts: Iterable[str]) -> None:
    """Print lines as they are."""
    for text in texts:
        print(text)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows: as a table on a terminal, with tabs between the cells elsewhere; nothing if there are none."""
    texts = [[str(cell) for cell in row] for row in rows]
    if not texts:
        return
    if not sys.stdout.isatty():
        lines("\t".join(row) for row in [columns, *texts])
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(*columns, title=title, title_justify="left")
    for row in texts:
        drawn.add_row(*map(escape, row))
    Console().print(drawn)


def tracked[T](items: Iterable[T], *, total: int, what: str) -> Iterator[T]:
    """Pass items on, with a progress bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description=what, total=total, console=Console(stderr=True), transient=True)


def byte_text(count: int) -> str:
    """Write a number of bytes for people, in powers of 1024."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
