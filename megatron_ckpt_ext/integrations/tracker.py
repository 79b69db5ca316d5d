"""Megatron's tracker file: written atomically, and an unreadable one is an error with a way out.

Megatron truncates and writes the file in place, so a crash in between leaves it empty, and the next job then prints a
line and ends with exit code 0, as if it had finished.
"""

import io
import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from megatron_ckpt_ext.compat.msc import mapped_profile, megatron_uses_msc, object_url
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.publish.atomic import write_file
from megatron_ckpt_ext.publish.latest import latest_complete_step

__all__ = ["TRACKER_FILE", "explaining_loader", "explaining_reader", "tracker_writer", "writing_whole"]

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Names the newest checkpoint of a directory."""


def tracker_writer(stock: Any) -> Any:
    """Stand in for what ``checkpointing`` opens files with; only the tracker is written differently.

    Args:
        stock: a module with ``open``, or, before megatron-core 0.19, a function.
    """
    return _Opening(stock) if hasattr(stock, "open") else _opener(stock)


class _Opening(ModuleType):
    def __init__(self, real: Any) -> None:
        super().__init__("maybe_msc")
        self._real = real

        def open_now(*args: Any, **options: Any) -> Any:
            """Looked up in each call: Megatron turns the multi-storage client on later."""
            return real.open(*args, **options)

        self.open = _opener(open_now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _opener(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``open``: the tracker appears whole at the end of its ``with`` block, wherever it lies."""

    @wraps(stock)
    def open_file(path: str, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode != "w" or os.path.basename(str(path)) != TRACKER_FILE:
            return stock(path, mode, *args, **options)
        if _is_local(str(path)):
            return _WholeFile(lambda text: write_file(str(path), [text.encode()]))
        return _WholeFile(lambda text: _write(stock(path, mode, *args, **options), text))

    return open_file


def writing_whole(write: Callable[[str], None]) -> io.StringIO:
    """Return a file whose text is handed to ``write`` at the end of its ``with`` block, unless that raises."""
    return _WholeFile(write)


class _WholeFile(io.StringIO):
    """Text that is written at the end of its ``with`` block, unless that ends with an exception."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self._write(self.getvalue())
        super().__exit__(kind, error, trace)


def _is_local(path: str) -> bool:
    """Whether Megatron will read it back from a file system, and not through the multi-storage client."""
    is_mapped = megatron_uses_msc() and mapped_profile(path) is not None
    return "://" not in path and object_url(path) is None and not is_mapped


def _write(file: Any, text: str) -> None:
    with file:
        file.write(text)


def explaining_loader(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what looks for a checkpoint, and with ``--exit-on-missing-checkpoint`` ends with exit code 0 as well."""

    @wraps(stock)
    def load_base_checkpoint(*args: Any, **options: Any) -> Any:
        try:
            return stock(*args, **options)
        except SystemExit as exit_:
            if exit_.code:
                raise
            raise ConfigurationError(
                "--exit-on-missing-checkpoint was given, and there is no checkpoint to load: name its directory with "
                "--load, or leave the flag out to start from random"
            ) from exit_

    return load_base_checkpoint


def explaining_reader(stock: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap ``checkpointing.read_metadata``, which ends the process with exit code 0 on a tracker it cannot read."""

    @wraps(stock)
    def read_metadata(tracker_filename: str) -> Any:
        try:
            return stock(tracker_filename)
        except SystemExit as exit_:
            if exit_.code:
                raise
            newest = latest_complete_step(os.path.dirname(tracker_filename)).step
            remedy = "there is no complete checkpoint beside it" if newest is None else f"write {newest} into it"
            raise ConfigurationError(
                f"the tracker {tracker_filename} does not hold the number of an iteration: {remedy}, or remove it to "
                "start anew"
            ) from exit_

    return read_metadata
