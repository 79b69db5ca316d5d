"""The settings of a ``CheckpointManager``, checked as a whole when they are made."""

from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Any

from megatron_ckpt_ext.errors import ConfigurationError

__all__ = ["ManagerConfig"]

_MAX_SECONDS = 365 * 86400


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagerConfig:
    """How a trainer saves. Equal on all ranks.

    Raises:
        ConfigurationError: a setting that cannot be, or several that cannot be together; with the remedy.
    """

    async_save: bool = False
    """Whether ``save`` returns once the state is staged, and writes in the background."""
    keep_last: int | None = None
    """How many of the newest complete steps stay; ``None``: with no ``keep_interval`` either, all of them."""
    keep_interval: int | None = None
    """Steps that this number divides stay as well."""
    ckpt_metadata: str | None = None
    """Path of the prepared metadata."""
    ckpt_metadata_create: bool = False
    """Whether to make it unless one that fits is there."""
    ckpt_metadata_on_drift: str = "rebuild"
    """What a save does that does not match: ``"rebuild"`` it with all ranks, or ``"fail"``."""
    writer: str = "thread"
    """Who writes in the background: a ``"thread"`` from staged host memory, or NVRx's ``"process"``."""
    subdirectory: str = ""
    """Name of the directory in ``step_N`` that the checkpoint is; empty: ``step_N`` itself is."""
    staging_limit: int | None = None
    """Most bytes of host memory that a rank stages; ``None``: what is free."""
    save_timeout: float = 1800.0
    """Seconds after which a save that is waited for is given up."""
    files_per_rank: int = 1
    """Files that each rank writes."""
    events: str | None = None
    """Path of the events file, without the rank."""
    progress: bool = True
    """Whether rank 0 shows long writes and loads on a terminal."""

    @classmethod
    def from_args(cls, args: Namespace, prefix: str = "ckpt") -> "ManagerConfig":
        """Read what ``add_manager_args`` parsed with this prefix; what was not given keeps its default."""
        names = {field.name: f"{prefix}.{field.name}" for field in fields(cls)}
        return cls(**{name: getattr(args, dest) for name, dest in names.items() if hasattr(args, dest)})

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("keep_last", "keep_interval", "staging_limit", "files_per_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _wrong(name, value, "a number from 1 on", "leave it out for none")
        _check_choice("ckpt_metadata_on_drift", self.ckpt_metadata_on_drift, ("rebuild", "fail"))
        _check_choice("writer", self.writer, ("thread", "process"))
        if not 0 < self.save_timeout < _MAX_SECONDS:
            raise _wrong("save_timeout", self.save_timeout, "a number of seconds between 0 and a year", "give one")
        if self.ckpt_metadata is None and (self.ckpt_metadata_create or self.ckpt_metadata_on_drift != "rebuild"):
            given = "ckpt_metadata_create" if self.ckpt_metadata_create else "ckpt_metadata_on_drift"
            raise ConfigurationError(f"{given} was given without ckpt_metadata: add the path of the file")
        if self.writer == "process" and not self.async_save:
            raise ConfigurationError('writer "process" was given without async_save: add it, or leave writer out')


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _wrong(name, value, " or ".join(choices), "choose one")


def _wrong(name: str, value: Any, expected: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"{name} is {value!r}, not {expected}: {remedy}")
