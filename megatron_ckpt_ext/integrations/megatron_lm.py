"""``install``: put the package into the Megatron-LM that is importable, without editing it.

Megatron looks the replaced names up in its own modules at call time, so whoever runs the training loop afterwards,
``pretrain_gpt.py`` or another script, gets the extension.
"""

import atexit
import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from megatron_ckpt_ext.arguments.flags import FLAGS, add_ckpt_ext_args
from megatron_ckpt_ext.compat.megatron_sites import SITES, find_sites
from megatron_ckpt_ext.compat.megatron_training import (
    unfinalized_saves,
    unsupported_fsdp,
    unsupported_megatron,
    unsupported_reason,
)
from megatron_ckpt_ext.config import CkptExtConfig
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.integrations.fingerprint import set_defaults
from megatron_ckpt_ext.integrations.megatron_fsdp import installed_mode, save_synchronously
from megatron_ckpt_ext.integrations.running import RunningJob
from megatron_ckpt_ext.integrations.session import MegatronSession
from megatron_ckpt_ext.replacements import Replacement, Replacements
from megatron_ckpt_ext.strategy.fsdp_dtensor_mode import find_facts

__all__ = ["Installation", "install"]

logger = logging.getLogger(__name__)

_MARK = "megatron_ckpt_ext_installation"


class Installation:
    """What ``install`` did. Owns the replaced names and the running job.

    Attributes:
        unsupported: why only the flags were installed and saves are stock; ``None`` if everything was. Where it is
            NVRx alone, saves of ``fsdp_dtensor`` are ours nevertheless, and synchronous.
        hooks: the names that were replaced.
    """

    def __init__(self) -> None:
        """Replace the names of the importable Megatron."""
        self.unsupported = unsupported_reason() or find_facts(async_save=True).problem or None
        self._job = RunningJob()
        self._sites, _ = find_sites(SITES)
        self._replacements = Replacements()
        hooks = list(self._hooks())
        self.hooks = tuple(f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _ in hooks)
        self._replacements.apply(hooks)

    def close(self) -> None:
        """Put every name back and end the session. Safe to call twice."""
        self._replacements.__exit__()
        self._job.close()

    @property
    def session(self) -> MegatronSession | None:
        """The package in the running job; ``None`` before Megatron is initialised."""
        return self._job.session

    def check(self, args: Namespace) -> None:
        """Read the settings of a parsed command line. No collectives.

        Raises:
            ConfigurationError: flags that cannot work together.
        """
        self._job.config = CkptExtConfig.from_args(args)

    def begin(self, args: Namespace) -> None:
        """Begin the session of a job. Called on all ranks; ``MegatronSession`` has the collectives and errors.

        Megatron's ``initialize_megatron`` does it, so this is for who installs the package later.

        Args:
            args: Megatron's, validated.
        """
        atexit.register(self._job.start(args).close)

    def _flag_hooks(self) -> Iterator[Replacement]:
        from megatron.training import arguments

        stock = arguments.add_megatron_arguments

        @wraps(stock)
        def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
            return add_ckpt_ext_args(stock(parser))

        setattr(add_megatron_arguments, _MARK, self)
        yield arguments, "add_megatron_arguments", add_megatron_arguments

    def _hooks(self) -> Iterator[Replacement]:
        if self.unsupported is None:
            return self._all_hooks()
        if "flags" not in self._sites:
            return iter(())
        return self._flag_hooks() if unsupported_megatron() else self._dtensor_hooks()

    def _dtensor_hooks(self) -> Iterator[Replacement]:
        """What saves and loads of ``fsdp_dtensor`` need, with NVRx and without."""
        from megatron.training import checkpointing

        from megatron_ckpt_ext.integrations.megatron_fsdp import fsdp_hooks
        from megatron_ckpt_ext.integrations.non_persistent import leaving_complete
        from megatron_ckpt_ext.integrations.tracker import explaining_loader, explaining_reader, tracker_writer

        yield from self._flag_hooks()
        yield self._sites["validation"].replaced(self._checking)
        yield self._sites["start"].replaced(self._starting)
        yield self._sites["tracker"].replaced(tracker_writer)
        yield self._sites["tracker reader"].replaced(explaining_reader)
        yield self._sites["loader"].replaced(explaining_loader)
        yield self._sites["clean-up"].replaced(lambda stock: leaving_complete(stock, lambda: self._job.saves))
        observed = self._saving(checkpointing.save_checkpoint)
        yield checkpointing, "save_checkpoint", observed
        yield self._sites["save"].replaced(lambda _stock: observed)
        yield from fsdp_hooks(lambda: None if self.session is None else self.session.fsdp)

    def _stock_reason(self, args: Namespace) -> str | None:
        """Why the saves of a job are stock; without NVRx those of ``fsdp_dtensor`` are not."""
        return unsupported_fsdp() if getattr(args, "ckpt_format", None) == "fsdp_dtensor" else self.unsupported

    def _all_hooks(self) -> Iterator[Replacement]:
        from megatron_ckpt_ext.integrations.dist_checkpointing import DistCheckpointing

        yield from self._dtensor_hooks()
        yield self._sites["queue"].replaced(self._job.choosing)
        yield self._sites["strategy"].replaced(lambda _stock: self._job.strategy)
        yield self._sites["wrapper"].replaced(lambda _stock: self._job.wrapper)
        yield self._sites["dist_checkpointing"].replaced(DistCheckpointing)
        yield self._sites["schedule"].replaced(self._scheduling)
        yield self._sites["finalize"].replaced(self._finalizing)

    def _checking(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stock)
        def validate_args(args: Namespace, *rest: Any, **options: Any) -> Any:
            # Before Megatron's own validation: that clears async_save where the persistent worker is missing.
            if self._stock_reason(args) is None:
                self.check(args)
            result = stock(args, *rest, **options)
            if self._job.config.saves_dtensors and not (mode := installed_mode()).asynchronous:
                save_synchronously(args, mode.reason)  # else Megatron starts a writer that this rank cannot have
            return result

        return validate_args

    def _starting(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stock)
        def initialize_megatron(*args: Any, **options: Any) -> Any:
            from megatron.training import get_args

            result = stock(*args, **options)
            if reason := self._stock_reason(get_args()):
                _warn_of_stock_saves(reason)
                return result
            if getattr(get_args(), "yaml_cfg", None) is not None:
                _refuse_lost_flags()
            set_defaults(get_args())
            self.begin(get_args())
            return result

        return initialize_megatron

    def _saving(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stock)
        def save_checkpoint(iteration: int, *args: Any, **options: Any) -> Any:
            return self._job.save(iteration, lambda: stock(iteration, *args, **options))

        return save_checkpoint

    def _scheduling(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stock)
        def schedule_async_save(*args: Any, **options: Any) -> Any:
            return self._job.schedule(lambda: stock(*args, **options))

        return schedule_async_save

    def _finalizing(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stock)
        def maybe_finalize_async_save(*args: Any, **options: Any) -> Any:
            return self._job.finalize(lambda: stock(*args, **options), unfinalized_saves)

        return maybe_finalize_async_save


def _refuse_lost_flags() -> None:
    """Megatron's ``--yaml-cfg`` replaces all parsed arguments, ours too, and says nothing.

    Raises:
        ConfigurationError: one of our flags was given.
    """
    ours = [flag.option for flag in FLAGS if flag.option.startswith("--ckpt-")]
    lost = [word for word in sys.argv if word.split("=")[0] in ours]
    if lost:
        raise ConfigurationError(
            f"{lost[0]} has no effect beside --yaml-cfg, which replaces the whole command line: give up one of them"
        )


def _warn_of_stock_saves(reason: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.warning("megatron-ckpt-ext: saves are stock: %s.", reason)


def install(args: Namespace | None = None) -> Installation:
    """Install the package into the Megatron that is importable now. Idempotent; no collectives.

    Call it before Megatron parses its arguments; ``megatron-ckpt run`` does it for a script that does not. Versions
    that are not supported get the flags and run stock, with one warning.

    Args:
        args: arguments that were parsed already, to check at once.

    Returns:
        What was installed; the same object on a second call.

    Raises:
        ConfigurationError: ``args`` cannot work together.
    """
    from megatron.training import arguments

    installation: Installation | None = getattr(getattr(arguments, "add_megatron_arguments", None), _MARK, None)
    if installation is None:
        installation = Installation()
        if unsupported_megatron() and installation.unsupported:
            _warn_of_stock_saves(installation.unsupported)
    if args is not None:
        installation.check(args)
    return installation
