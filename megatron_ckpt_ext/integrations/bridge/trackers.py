"""Bridge's trackers: they appear whole, and after everything that a resumed job reads.

Bridge copies and writes them in place, and ``run_config.yaml`` after them: a job that is killed in between leaves a
tracker that cannot be read, or one that names a checkpoint without the configuration that a load looks for.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_ckpt_ext.compat.bridge import TRACKERS
from megatron_ckpt_ext.integrations.tracker import writing_whole
from megatron_ckpt_ext.publish.atomic import write_file

__all__ = ["moving_last", "whole_trackers"]

type Move = Callable[[str, bytes], None]
"""Makes a tracker of this path have this content."""


def moving_last(finalizer: Callable[[], Any], module: ModuleType) -> Callable[[], Any]:
    """Wrap the finalizer that writes trackers: they are moved once it has ended, unless it raises.

    Args:
        finalizer: Bridge's.
        module: where it looks up ``open`` and ``shutil``.
    """

    @wraps(finalizer)
    def finalize() -> None:
        moves: list[tuple[str, bytes]] = []
        with whole_trackers(module, lambda path, content: moves.append((path, content))):
            finalizer()
        for move in moves:
            _move(*move)

    return finalize


@contextmanager
def whole_trackers(module: ModuleType, move: Move | None = None) -> Iterator[None]:
    """While it lasts, ``module`` writes and copies trackers whole; all other files as ever.

    Args:
        module: of Bridge.
        move: takes what a tracker is to be; by default it is written at once.
    """
    move = move or _move
    names = vars(module)
    before: dict[str, Any] = {name: names[name] for name in ("open", "shutil") if name in names}

    def open_file(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode == "w" and _is_tracker(path):
            return writing_whole(lambda text: move(str(path), text.encode()))
        return before.get("open", open)(path, mode, *args, **options)

    names.update(open=open_file, shutil=_Copying(before["shutil"], move))
    try:
        yield
    finally:
        del names["open"]
        names.update(before)


class _Copying(ModuleType):
    """``shutil``, whose ``copy`` hands trackers over."""

    def __init__(self, real: Any, move: Move) -> None:
        super().__init__(real.__name__)
        self._real = real

        def copy(source: Any, target: Any, **options: Any) -> Any:
            if not _is_tracker(target):
                return real.copy(source, target, **options)
            move(str(target), Path(source).read_bytes())
            return target

        self.copy = copy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _is_tracker(path: Any) -> bool:
    return os.path.basename(str(path)) in TRACKERS


def _move(path: str, content: bytes) -> None:
    write_file(path, [content])
