"""A judge of completeness that reads each checkpoint once."""

import os
from collections.abc import Callable
from typing import NamedTuple

from megatron_ckpt_ext.compat.dcp import METADATA_FILE
from megatron_ckpt_ext.publish.completeness import CheckpointReport, verify_checkpoint

__all__ = ["RememberingJudge"]


class _Identity(NamedTuple):
    """A ``.metadata`` as it was published: a save or a copy makes another one."""

    inode: int
    size: int
    changed_ns: int


class RememberingJudge:
    """``verify_checkpoint``, asked once for each ``.metadata`` that it found complete.

    A checkpoint counts as complete for as long as its ``.metadata`` is the same file, so data files that are lost later
    go unnoticed: resume with ``verify_checkpoint`` itself. What is incomplete is judged anew each time.
    """

    def __init__(self, judge: Callable[[str], CheckpointReport] = verify_checkpoint) -> None:
        """Remember what ``judge`` says."""
        self._judge = judge
        self._complete: dict[str, tuple[_Identity, CheckpointReport]] = {}

    def __call__(self, path: str) -> CheckpointReport:
        """Judge the checkpoint in the directory ``path``. No collectives."""
        identity = _identity(path)
        known = self._complete.get(path)
        if known is not None and known[0] == identity:
            return known[1]
        report = self._judge(path)
        if report.complete and identity is not None:
            self._complete[path] = identity, report
        return report


def _identity(path: str) -> _Identity | None:
    try:
        found = os.stat(os.path.join(path, METADATA_FILE))
    except OSError:
        return None
    return _Identity(found.st_ino, found.st_size, found.st_ctime_ns)
