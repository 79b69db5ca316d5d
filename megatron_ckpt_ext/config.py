"""The settings of the package for one job, checked as a whole when they are made."""

from argparse import Namespace
from dataclasses import dataclass

from megatron_ckpt_ext.errors import ConfigurationError

__all__ = ["CkptExtConfig"]

_FORMATS = ("torch_dist", "fsdp_dtensor")
_MAX_SECONDS = 365 * 86400


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptExtConfig:
    """What a job asked for. Equal on all ranks.

    Raises:
        ConfigurationError: flags that cannot work together; it names the flag at fault and the remedy.
    """

    ckpt_metadata: str | None = None
    """Path of the prepared metadata."""
    ckpt_metadata_create: bool = False
    """Whether to make it unless one that fits is there."""
    ckpt_metadata_on_drift: str = "rebuild"
    """What a save does that does not match: ``"rebuild"`` it with all ranks, or ``"fail"``."""
    ckpt_save_timeout: float | None = None
    """Seconds that a save may go on without moving a byte; ``None``: 1800 where our queue is in charge."""
    ckpt_events: str | None = None
    """Path of the events file, without the rank."""
    async_save: bool = False
    """Whether saves are written in the background."""
    use_persistent_ckpt_worker: bool = True
    """Whether one writer process lives as long as the job; Megatron clears ``async_save`` without it."""
    async_strategy: str = "nvrx"
    """Whose asynchronous machinery writes: ``"nvrx"`` or ``"mcore"``."""
    ckpt_format: str = "torch_dist"
    """Megatron's checkpoint format."""
    save: str | None = None
    """Directory of the checkpoints."""
    enable_msc: bool = False
    """Whether paths go through the multi-storage client."""

    @classmethod
    def from_args(cls, args: Namespace) -> "CkptExtConfig":
        """Read the settings of a parsed command line; what a plain parser lacks keeps its default.

        Read it before Megatron's ``validate_args``, which changes ``async_save`` and ``async_strategy``.
        """
        known = {name: getattr(args, name) for name in cls.__dataclass_fields__ if hasattr(args, name)}
        return cls(**known)

    def __post_init__(self) -> None:
        """Refuse combinations that cannot work."""
        if self.ckpt_save_timeout is not None and not 0 < self.ckpt_save_timeout < _MAX_SECONDS:
            raise ConfigurationError(
                f"--ckpt-save-timeout {self.ckpt_save_timeout:g} is no number of seconds between 0 and a year: "
                "give one that is larger than the longest pause of your storage"
            )
        if self.ckpt_metadata is None:
            for flag, given in (
                ("--ckpt-metadata-create", self.ckpt_metadata_create),
                (f"--ckpt-metadata-on-drift {self.ckpt_metadata_on_drift}", self.ckpt_metadata_on_drift != "rebuild"),
            ):
                if given:
                    raise ConfigurationError(f"{flag} was given without --ckpt-metadata: add --ckpt-metadata FILE")
            if self.ckpt_save_timeout is not None and not self._is_asynchronous:
                raise ConfigurationError(
                    "--ckpt-save-timeout was given, but saves are not asynchronous: add --async-save and "
                    "--use-persistent-ckpt-worker with --ckpt-format torch_dist or fsdp_dtensor, without "
                    "--async-strategy mcore, or leave it out"
                )
            if self.ckpt_save_timeout is not None and not self.save:
                raise ConfigurationError(
                    "--ckpt-save-timeout was given, but nothing is saved: add --save DIRECTORY, or leave it out"
                )
            return
        problem = self._problem()
        if problem is not None:
            raise ConfigurationError(f"--ckpt-metadata {self.ckpt_metadata} was given {problem}")

    @property
    def _is_asynchronous(self) -> bool:
        return self.async_save and self.use_persistent_ckpt_worker and self._has_our_writer

    @property
    def _has_our_writer(self) -> bool:
        return self.async_strategy == "nvrx" or (self.ckpt_format == "fsdp_dtensor" and not self._saves_objects)

    @property
    def _saves_objects(self) -> bool:
        return _is_object(self.save or "")

    @property
    def saves_dtensors(self) -> bool:
        """Whether asynchronous saves of ``fsdp_dtensor`` are asked for; with either strategy, they are ours."""
        is_ours = self.ckpt_format == "fsdp_dtensor" and self._is_asynchronous
        return is_ours and bool(self.save) and not self._saves_objects

    @property
    def owns_queue(self) -> bool:
        """Whether asynchronous saves go through our queue."""
        return self.ckpt_metadata is not None or self.ckpt_save_timeout is not None or self.saves_dtensors

    def _problem(self) -> str | None:
        if not self.ckpt_metadata:
            return "an empty file name: name the prepared metadata file"
        if not self.async_save:
            return (
                "without --async-save: add --async-save, only asynchronous saves, of torch_dist and fsdp_dtensor, "
                "reuse metadata"
            )
        if not self.use_persistent_ckpt_worker:
            return (
                "with --async-save but without --use-persistent-ckpt-worker: add --use-persistent-ckpt-worker, "
                "Megatron saves synchronously without it"
            )
        if self._saves_objects and self.ckpt_format == "fsdp_dtensor":
            return f"with --ckpt-format {self.ckpt_format} and --save {self.save}: save to a directory"
        if not self._has_our_writer:
            return (
                f"with --async-strategy {self.async_strategy}: remove it or say nvrx, "
                "whose writer is the only one that is supported"
            )
        if self.ckpt_format not in _FORMATS:
            return f"with --ckpt-format {self.ckpt_format}: use {' or '.join(_FORMATS)}, or leave --ckpt-metadata out"
        if not self.save:
            return "without --save: add --save DIRECTORY, or leave --ckpt-metadata out"
        if _is_object(self.ckpt_metadata):
            return (
                "on a path of the multi-storage client: name a file on a local or shared file system, every job reads "
                "it anew"
            )
        if self._saves_objects and not self.enable_msc:
            return f"with --save {self.save} but without --enable-msc: add --enable-msc, or save to a directory"
        return None


def _is_object(path: str) -> bool:
    return path.startswith("msc:/")
