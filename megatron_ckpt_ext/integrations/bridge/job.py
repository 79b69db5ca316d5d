"""``BridgeJob``: the package in one Bridge job, from its configuration to the end of its last save."""

import atexit
import logging
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

from megatron.bridge.training.state import GlobalState

from megatron_ckpt_ext.compat.bridge import SITES, checkpointing, is_tracker_finalizer, queue_site, unmatched
from megatron_ckpt_ext.compat.megatron_sites import find_sites
from megatron_ckpt_ext.compat.megatron_training import nvrx_version, unsupported_nvrx
from megatron_ckpt_ext.config import CkptExtConfig
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.integrations.bridge.arguments import arguments_of
from megatron_ckpt_ext.integrations.bridge.retention import keeping_complete
from megatron_ckpt_ext.integrations.bridge.trackers import moving_last, whole_trackers
from megatron_ckpt_ext.integrations.bridge.visible import keep_warnings_visible
from megatron_ckpt_ext.integrations.dist_checkpointing import DistCheckpointing
from megatron_ckpt_ext.integrations.megatron_fsdp import (
    Destination,
    installed_mode,
    placing,
    returning,
    save_synchronously,
    unchecked,
)
from megatron_ckpt_ext.integrations.running import RunningJob
from megatron_ckpt_ext.replacements import Replacement, Replacements

__all__ = ["BridgeJob", "take_over_queue"]

logger = logging.getLogger(__name__)


class BridgeJob:
    """What one configuration asks for, and the job that trains with it.

    Attributes:
        stock: why saves are Bridge's own; ``None`` if they are ours.
    """

    def __init__(self, container: Any) -> None:
        """Belong to a configuration. No collectives.

        Args:
            container: a ``ConfigContainer`` whose ``checkpoint`` is a ``CkptExtCheckpointConfig``.
        """
        self._container = container
        self._job = RunningJob()
        self._falls_back = False
        self.stock: str | None = None

    def settle(self) -> None:
        """Read the settings once overrides are applied, and put right what they leave wrong. No collectives.

        Bridge turns ``async_strategy`` to ``mcore`` when a configuration is built with synchronous saves, and an
        override of ``async_save`` leaves it there; with ``fsdp_dtensor`` its saves then hang (Bridge issue 6084).

        Raises:
            ConfigurationError: settings that cannot work together.
        """
        keep_warnings_visible()
        if self._falls_back:
            return
        checkpoint = self._container.checkpoint
        is_dtensors = checkpoint.ckpt_format == "fsdp_dtensor"
        self.stock = unmatched() or (None if is_dtensors else unsupported_nvrx(nvrx_version()))
        if self.stock is not None:
            return
        if checkpoint.async_save:
            checkpoint.async_strategy = "nvrx"
        args = arguments_of(self._container)
        with _named_as_keys():
            self._job.config = CkptExtConfig.from_args(args)
            if self._job.config.saves_dtensors and not (mode := installed_mode()).asynchronous:
                save_synchronously(args, mode.reason)
                self._follow(args)

    @contextmanager
    def choosing_queue(self) -> Iterator[None]:
        """While it lasts, the queue that Bridge builds for asynchronous saves is ours. No collectives."""
        self.settle()
        with Replacements() as replacements:
            if self.stock is None:
                replacements.apply([queue_site().replaced(self._job.choosing)])
            yield

    def start(self) -> None:
        """Begin the session. Called on all ranks, with torch.distributed initialised; as ``MegatronSession``.

        Raises:
            ConfigurationError: on every rank, with the same sentence.
        """
        self.settle()
        if self.stock is not None:
            if os.environ.get("RANK", "0") == "0":
                logger.warning("megatron-ckpt-ext: saves are Bridge's own: %s.", self.stock)
            return
        args = arguments_of(self._container)
        with _named_as_keys():
            atexit.register(self._job.start(args).close)
        self._follow(args)

    def save(self, step: int, save: Callable[[], None]) -> None:
        """Run Bridge's save of a step. Called on all ranks."""
        with ExitStack() as stack:
            stack.enter_context(self._standing_in())
            if self._is_ours and not self._container.checkpoint.async_save:
                stack.enter_context(whole_trackers(checkpointing()))
            self._job.save(step, save)

    def finalize(self, finalize: Callable[[], None], unfinalized: Callable[[], int]) -> None:
        """Run Bridge's finalizing of what is written. Called on all ranks.

        Args:
            finalize: Bridge's.
            unfinalized: how many saves are in flight.
        """
        with self._standing_in():
            self._job.finalize(finalize, unfinalized)

    def load[T](self, load: Callable[[], T]) -> T:
        """Run Bridge's load. Called on all ranks."""
        with self._standing_in():
            return load()

    @property
    def _is_ours(self) -> bool:
        return self._job.session is not None

    def _follow(self, args: Namespace) -> None:
        """Take over that saves are synchronous, if that was decided: Bridge reads it in each save and poll."""
        checkpoint = self._container.checkpoint
        self._falls_back |= bool(checkpoint.async_save) and not args.async_save
        checkpoint.async_save, checkpoint.async_strategy = args.async_save, args.async_strategy

    @contextmanager
    def _standing_in(self) -> Iterator[None]:
        """While it lasts, Bridge's saves, loads and finalizers find our names; nobody else does before and after."""
        with Replacements() as replacements:
            if self._is_ours:
                replacements.apply(self._replacements())
            yield

    def _replacements(self) -> Iterator[Replacement]:
        sites, _ = find_sites(SITES)
        stand_ins: dict[str, Callable[[Any], Any]] = {
            "strategy": lambda _stock: self._job.strategy,
            "wrapper": lambda _stock: self._job.wrapper,
            "dist_checkpointing": DistCheckpointing,
            "schedule": self._scheduling,
            "clean-up": lambda stock: keeping_complete(stock, lambda: self._job.saves),
        }
        fsdp = None if self._job.session is None else self._job.session.fsdp
        if fsdp is not None:
            from megatron.core.transformer import fsdp_dtensor_checkpoint

            stand_ins["dtensor shards"] = lambda stock: placing(stock, lambda: fsdp)
            build = fsdp_dtensor_checkpoint.make_fsdp_dtensor
            yield fsdp_dtensor_checkpoint, "make_fsdp_dtensor", unchecked(build, lambda: fsdp)
            if fsdp.requests:
                stand_ins["dtensor writer"] = lambda _stock: Destination
                stand_ins["dtensor plan"] = lambda _stock: fsdp.request
                stand_ins["dtensor request"] = returning
        for name, stand_in in stand_ins.items():
            if name in sites:
                yield sites[name].replaced(stand_in)

    def _scheduling(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stock)
        def schedule_async_save(state: Any, request: Any) -> Any:
            finalizers = [
                moving_last(each, checkpointing()) if is_tracker_finalizer(each) else each
                for each in request.finalize_fns
            ]
            return self._job.schedule(lambda: stock(state, request._replace(finalize_fns=finalizers)))

        return schedule_async_save


def take_over_queue() -> None:
    """Let jobs whose configuration has a ``BridgeJob`` get their queue from it; others are left alone. Idempotent.

    Bridge builds the queue, and starts a writer process, before there is a checkpoint manager.
    """
    stock = GlobalState.initialize_async_checkpoint_worker
    if hasattr(stock, _MARK):
        return

    @wraps(stock)
    def initialize_async_checkpoint_worker(self: Any) -> None:
        job = None if self.cfg is None else getattr(self.cfg.checkpoint, "job", None)
        with nullcontext() if job is None else job.choosing_queue():
            stock(self)

    setattr(initialize_async_checkpoint_worker, _MARK, True)
    GlobalState.initialize_async_checkpoint_worker = initialize_async_checkpoint_worker


_MARK = "megatron_ckpt_ext_queue"


@contextmanager
def _named_as_keys() -> Iterator[None]:
    """Let what is refused in it name settings as Bridge does: ``checkpoint.async_save``, and not ``--async-save``."""
    try:
        yield
    except ConfigurationError as error:
        text = re.sub(r"--([a-z][a-z-]*)", lambda flag: "checkpoint." + flag[1].replace("-", "_"), str(error))
        raise ConfigurationError(text) from error
