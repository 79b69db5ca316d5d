"""Deletion of one step: first it does not count any more, then it goes."""

import contextlib
import errno
import os
import shutil

from megatron_ckpt_ext.compat.dcp import METADATA_FILE
from megatron_ckpt_ext.publish.steps import StepPaths
from megatron_ckpt_ext.publish.storage.interface import storage_of
from megatron_ckpt_ext.publish.storage.marker import MARKER_FILE

__all__ = ["remove_step"]


def remove_step(paths: StepPaths, step: int) -> None:
    """Remove the checkpoint of a step with everything in its directory. No collectives.

    ``.metadata`` goes first, durably, so a deletion that is cut off leaves an incomplete step and never a damaged one.
    Links in the directory are removed, not followed, and a link in its place is an error. The ``step_N`` around a
    subdirectory goes if nothing else is in it.

    Raises:
        OSError: something cannot be removed; the step is complete, or has no ``.metadata``.
    """
    path = paths.path(step)
    for place in (paths.parent(step), path):
        if os.path.islink(place):
            raise NotADirectoryError(errno.ENOTDIR, "A link is not followed", place)
    storage = storage_of(path)
    for name in (MARKER_FILE, METADATA_FILE):
        storage.remove(os.path.join(path, name))
    shutil.rmtree(path)
    if paths.subdirectory:
        with contextlib.suppress(OSError):  # others have something in it
            os.rmdir(paths.parent(step))
