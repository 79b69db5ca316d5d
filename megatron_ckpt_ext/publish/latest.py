"""``latest_complete_step``: where to resume, and what was passed over."""

import os
import re
from dataclasses import dataclass

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.publish.completeness import CheckpointReport, verify_checkpoint
from megatron_ckpt_ext.publish.storage.interface import storage_of

__all__ = ["LatestStep", "latest_complete_step"]

_STEP = re.compile(r"iter_([0-9]{7}|[1-9][0-9]{7,17})|step_(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True, kw_only=True, slots=True)
class LatestStep:
    """The newest complete checkpoint of a directory."""

    step: int | None
    """Its step, or ``None`` if no checkpoint is complete."""
    path: str | None
    """Its directory."""
    skipped: tuple[CheckpointReport, ...]
    """Newer checkpoints that are not complete, newest first; ``reason`` of each says why."""


def latest_complete_step(directory: str | os.PathLike[str]) -> LatestStep:
    """Find the newest complete checkpoint among ``iter_NNNNNNN`` (Megatron) and ``step_N`` in ``directory``.

    Anything else is not ours and ignored: other names, files, and links that lead to no directory. A link to a
    directory counts as one. Older checkpoints than the one found are not looked at. No collectives, no process group;
    on a shared file system ranks may see different things, so let one rank ask and tell the others.

    Args:
        directory: of the checkpoints, or ``msc://profile/prefix``. A prefix that holds nothing is an empty directory.

    Raises:
        ConfigurationError: ``directory`` is missing or cannot be listed.
    """
    skipped: list[CheckpointReport] = []
    for step, path in sorted(_steps(os.fspath(directory)), reverse=True):
        report = verify_checkpoint(path)
        if report.complete:
            return LatestStep(step=step, path=path, skipped=tuple(skipped))
        skipped.append(report)
    return LatestStep(step=None, path=None, skipped=tuple(skipped))


def _steps(directory: str) -> list[tuple[int, str]]:
    storage = storage_of(directory)
    try:
        names = storage.subdirectories(directory)
    except OSError as error:
        raise ConfigurationError(
            f"the checkpoint directory {directory!r} cannot be listed: {error.strerror}. Name a directory that holds "
            "iter_NNNNNNN or step_N checkpoints"
        ) from error
    return [
        (int(match[1] or match[2]), os.path.join(storage.directory(directory), name))
        for name in names
        if (match := _STEP.fullmatch(name))
    ]
