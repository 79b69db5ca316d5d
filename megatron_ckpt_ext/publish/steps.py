"""Names of the steps that a checkpoint manager owns: ``step_N`` or ``step_N/SUBDIRECTORY``, and nothing else."""

import os
import re
from dataclasses import dataclass

from megatron_ckpt_ext.compat.msc import object_url
from megatron_ckpt_ext.errors import ConfigurationError

__all__ = ["StepPaths", "step_of"]

_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_STEPS = range(10**18)


def step_of(name: str) -> int | None:
    """Return N of the name ``step_N``, or ``None`` for any other name, ``step_007`` and ``step_7.tmp`` among them."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class StepPaths:
    """Where the steps of one manager lie.

    Raises:
        ConfigurationError: an ``msc://`` directory, or a subdirectory that is more than one name.
    """

    directory: str
    """Directory of the steps; need not exist yet."""
    subdirectory: str = ""
    """Name inside each ``step_N``, for managers that share them; empty: the step is ``step_N`` itself."""

    def __post_init__(self) -> None:
        """Refuse what could reach another directory than one of a step."""
        if object_url(self.directory) is not None:
            raise ConfigurationError(
                f"the directory of steps {self.directory!r} is no directory of a file system: name one that is"
            )
        if self.subdirectory in (os.curdir, os.pardir) or re.search(r"[/\0]", self.subdirectory):
            raise ConfigurationError(
                f"the subdirectory {self.subdirectory!r} is not the name of one directory inside step_N: "
                "give a name without slashes, or leave it out"
            )

    def path(self, step: int) -> str:
        """Return the directory of a step's checkpoint. No I/O.

        Raises:
            ConfigurationError: negative, or more than 18 digits.
        """
        return os.path.join(self.parent(step), *filter(None, (self.subdirectory,)))

    def parent(self, step: int) -> str:
        """Return the ``step_N`` that the checkpoint is, or lies in. No I/O.

        Raises:
            ConfigurationError: negative, or more than 18 digits.
        """
        if step not in _STEPS:
            raise ConfigurationError(f"{step} is no number of a step: give one from 0 to {_STEPS[-1]}")
        return os.path.join(self.directory, f"step_{step}")

    def steps(self) -> tuple[int, ...]:
        """Return the steps that are there, complete or not, ascending; none where ``directory`` is missing.

        Only real directories count: what a link leads to belongs to somebody else. No collectives.

        Raises:
            OSError: it cannot be listed.
        """
        try:
            with os.scandir(self.directory) as entries:
                named = [(step_of(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
        except FileNotFoundError:
            return ()
        steps = sorted(step for step, is_directory in named if step is not None and is_directory)
        return tuple(step for step in steps if not self.subdirectory or _is_real_directory(self.path(step)))


def _is_real_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
