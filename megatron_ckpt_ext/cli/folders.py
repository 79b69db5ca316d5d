"""What the file system refuses on every rank, asked before any is started; nothing is made or changed here."""

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_ckpt_ext.cli.words import has_flag, is_megatrons, last_value

__all__ = ["events_refusal", "unwritable_refusal"]


def unwritable_refusal(words: Sequence[str]) -> str | None:
    """Refuse a ``--save`` of a Megatron job that the nearest existing folder above it does not let this user make."""
    directory = last_value(words, "--save")
    if not directory or "://" in directory or not is_megatrons(words) or has_flag(words, "--skip-train"):
        return None
    place = Path(os.path.abspath(directory))
    nearest = next((folder for folder in (place, *place.parents) if os.path.exists(folder)), place)
    if not nearest.is_dir():
        return f"--save {directory} needs a directory, but {nearest} is a file: name another directory."
    if not _can_write(nearest):
        return (
            f"--save {directory} cannot be made or written, since this user may not write in {nearest}: "
            "name another directory, or correct its permissions."
        )
    return None


def events_refusal(words: Sequence[str]) -> str | None:
    """Refuse a ``--ckpt-events`` whose folder is not there: each rank opens its file before the first step."""
    file = last_value(words, "--ckpt-events")
    if not file or not is_megatrons(words) or os.path.isdir(folder := os.path.dirname(os.path.abspath(file))):
        return None
    return f"--ckpt-events {file} is in {folder}, which is no existing directory: make that first, or name another."


def _can_write(folder: Path) -> bool:
    """Whether this process may make a file there."""
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
