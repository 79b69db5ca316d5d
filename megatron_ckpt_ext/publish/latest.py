"""``latest_complete_step``: where to resume, and what was passed over."""

import os
import re
from dataclasses import dataclass

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.publish.completeness import CheckpointReport, verify_checkpoint
from megatron_ckpt_ext.publish.steps import StepPaths, step_of
from megatron_ckpt_ext.publish.storage.interface import storage_of

__all__ = ["LatestStep", "all_steps", "latest_complete_step", "step_number"]

_ITERATION = re.compile(r"iter_([0-9]{7}|[1-9][0-9]{7,17})")


@dataclass(frozen=True, kw_only=True, slots=True)
class LatestStep:
    """The newest complete checkpoint of a directory."""

    step: int | None
    """Its step, or ``None`` if no checkpoint is complete."""
    path: str | None
    """Its directory."""
    skipped: tuple[CheckpointReport, ...]
    """Newer checkpoints that are not complete, newest first; ``reason`` of each says why."""


def latest_complete_step(directory: str | os.PathLike[str], *, subdirectory: str | None = None) -> LatestStep:
    """Find the newest complete checkpoint among ``iter_NNNNNNN`` (Megatron) and ``step_N`` in ``directory``.

    Anything else is not ours and ignored: other names, files, and links that lead to no directory. A link to a
    directory counts as one. Older checkpoints than the one found are not looked at. No collectives, no process group;
    on a shared file system ranks may see different things, so let one rank ask and tell the others.

    Args:
        directory: of the checkpoints, or ``msc://profile/prefix``. A prefix that holds nothing is an empty directory.
        subdirectory: look only at the steps of a ``CheckpointManager``: ``step_N/SUBDIRECTORY``, or with an empty
            string ``step_N``. A ``step_N`` that lacks it is not complete.

    Raises:
        ConfigurationError: ``directory`` is missing or cannot be listed, or ``subdirectory`` is not one name.
    """
    skipped: list[CheckpointReport] = []
    for step, path in sorted(_steps(os.fspath(directory), subdirectory), reverse=True):
        report = verify_checkpoint(path)
        if report.complete:
            return LatestStep(step=step, path=path, skipped=tuple(skipped))
        skipped.append(report)
    return LatestStep(step=None, path=None, skipped=tuple(skipped))


def all_steps(directory: str | os.PathLike[str], *, subdirectory: str | None = None) -> list[str]:
    """Return the directories of all steps, ascending, complete or not; the rest as above. No collectives."""
    return [path for _, path in sorted(_steps(os.fspath(directory), subdirectory))]


def _steps(directory: str, subdirectory: str | None) -> list[tuple[int, str]]:
    names = _names(directory)
    if subdirectory is not None:
        paths = StepPaths(directory, subdirectory)
        return [(step, paths.path(step)) for name in names if (step := step_of(name)) is not None]
    root = storage_of(directory).directory(directory)
    return [(step, os.path.join(root, name)) for name in names if (step := step_number(name)) is not None]


def step_number(name: str) -> int | None:
    """Return the step that the name of a checkpoint's directory tells, or ``None`` for any other name."""
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else step_of(name)


def _names(directory: str) -> list[str]:
    try:
        return storage_of(directory).subdirectories(directory)
    except OSError as error:
        raise ConfigurationError(
            f"the checkpoint directory {directory!r} cannot be listed: {error.strerror}. Name a directory that holds "
            "iter_NNNNNNN or step_N checkpoints"
        ) from error
