"""What a recipe says at its top: when to use it, and the commands that run it."""

import shlex
from itertools import takewhile
from pathlib import Path

__all__ = ["commands", "header"]


def header(path: Path) -> list[str]:
    """The comment at the top of a recipe, without its marks."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return [line.removeprefix("#").removeprefix(" ") for line in lines]


def commands(path: Path) -> list[list[str]]:
    """The commands at the top of a recipe, as words."""
    text = "\n".join(line for line in header(path) if line.startswith("  "))
    return [shlex.split(line) for line in text.replace("\\\n", "").splitlines()]
