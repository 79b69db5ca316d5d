"""Everything that outlives one save in a Megatron job, with one owner."""

import logging
import os
import sys
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_ckpt_ext.commit.commit import Committed, How, OnDrift
from megatron_ckpt_ext.compat.mcore import TorchDistSaveShardedStrategy
from megatron_ckpt_ext.config import CkptExtConfig
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.integrations.fingerprint import fingerprint_of
from megatron_ckpt_ext.integrations.megatron_fsdp import MegatronFsdp, dtensor_fingerprint, installed_mode
from megatron_ckpt_ext.integrations.observer import SaveObserver
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.strategy.startup import Action, Finding, agree_on_start, examine

if TYPE_CHECKING:
    from megatron_ckpt_ext.integrations.fsdp_writer import ProbedWarmWriter
    from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

__all__ = ["MegatronSession"]

logger = logging.getLogger(__name__)


class MegatronSession:
    """The package in one Megatron job, from the start of training to ``close``.

    Attributes:
        action: what the job does with prepared metadata.
        observer: records events; ``None`` without ``--ckpt-events``.
        fsdp: its saves and loads of ``fsdp_dtensor``; ``None`` with another format.
    """

    def __init__(
        self,
        args: Namespace,
        config: CkptExtConfig,
        warm: "ProbedWarmWriter | None" = None,
        earlier_fallback: str | None = None,
    ) -> None:
        """Decide with all ranks what this job does.

        Called on all ranks, after Megatron has initialised torch.distributed: one MIN all_reduce, and one new gloo
        group where prepared metadata is used. With ``fsdp_dtensor`` that group, and what ``MegatronFsdp`` needs.

        Args:
            args: of Megatron.
            config: what was asked for.
            warm: the writer process that was started, for ``fsdp_dtensor``.
            earlier_fallback: ``fallback`` of the session before an in-process restart.

        Raises:
            ConfigurationError: on every rank, with the same sentence.
        """
        self._config = config
        has_dtensors = config.ckpt_format == "fsdp_dtensor"
        self._fingerprint = fingerprint_of(args)
        if has_dtensors:
            self._fingerprint = dtensor_fingerprint(self._fingerprint)
        self._strategy: PreparedSaveStrategy | None = None
        self.observer: SaveObserver | None = None
        self._finding = agree_on_start(self._examine(), config)
        self.action = self._finding.action
        # A CPU group of our own: nothing synchronises the GPU, and nobody else's collectives come in between.
        own_group = (self.action is not Action.NOTHING or has_dtensors) and args.use_gloo_process_groups
        self._group: Any = dist.new_group(backend="gloo", timeout=_group_timeout(config)) if own_group else None
        self.fsdp = self._start_fsdp(args, warm, earlier_fallback) if has_dtensors else None
        if self.action is not Action.NOTHING:
            self._announce(self._finding)

    def _examine(self) -> Finding:
        """Find out what this rank can do; what it cannot is a vote to stop, for the others wait in the reduction."""
        rank = dist.get_rank()
        try:
            if self._config.ckpt_events:
                self.observer = SaveObserver(self._config.ckpt_events, rank, self._checkpoint_path)
        except ConfigurationError as error:
            return Finding(action=Action.STOP, reason=str(error))
        config = self._config
        return examine(
            config.ckpt_metadata,
            self._fingerprint,
            rank,
            dist.get_world_size(),
            create=config.ckpt_metadata_create,
        )

    def _start_fsdp(
        self, args: Namespace, warm: "ProbedWarmWriter | None", earlier_fallback: str | None
    ) -> MegatronFsdp:
        return MegatronFsdp.start(
            args,
            self._config,
            group=self._group,
            fingerprint=self._fingerprint,
            prepared=self._finding.prepared,
            on_commit=self._committed,
            warm=warm,
            earlier_fallback=earlier_fallback,
        )

    def strategy(self, *args: Any, **kwargs: Any) -> TorchDistSaveShardedStrategy:
        """Build the save strategy where Megatron builds its own, with the same arguments. No collectives."""
        if self.action is Action.NOTHING:
            return TorchDistSaveShardedStrategy(*args, **kwargs)
        from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

        prepared = self._finding.prepared if self._strategy is None else self._strategy.prepared
        self._strategy = PreparedSaveStrategy(
            *args,
            prepared_metadata=prepared,
            ckpt_metadata_create_path=self._config.ckpt_metadata if prepared is None else None,
            on_drift=OnDrift(self._config.ckpt_metadata_on_drift),
            fingerprint=self._fingerprint,
            process_group=self._group,
            on_commit=self._committed,
            results_in_answer=True,
            **kwargs,
        )
        return self._strategy

    @property
    def saves(self) -> bool:
        """Whether the saves of this job are ours, and not Megatron's own."""
        has_saver = self.fsdp is not None and self.fsdp.saver is not None
        return has_saver or self.action is not Action.NOTHING

    def saving(self) -> AbstractContextManager[None]:
        """Enter this around ``save_checkpoint``. No collectives."""
        return nullcontext() if self.fsdp is None else self.fsdp.saving()

    def written(self) -> tuple[int, int]:
        """Return items and bytes that this rank writes in each save, as far as known. No collectives."""
        prepared = self._prepared
        if prepared is None:
            return 0, 0
        locators = prepared.slice.locators
        return len(locators), sum(locator.length for locator in locators.values())

    @property
    def fallback(self) -> str | None:
        """Why saves are synchronous though asynchronous ones were asked for; ``None`` if they are not."""
        return None if self.fsdp is None else self.fsdp.reason

    @property
    def reason(self) -> str | None:
        """Why the next save is planned together where prepared metadata was asked for; or ``None``."""
        return self._finding.reason if self.action is Action.CREATE and self._prepared is None else None

    @property
    def _prepared(self) -> PreparedMetadata | None:
        """The layout that the next save follows."""
        if self.fsdp is not None:
            return None if self.fsdp.saver is None else self.fsdp.saver.prepared
        return None if self._strategy is None else self._strategy.prepared

    def close(self) -> None:
        """Close the events file and stop counting. Safe to call twice; the process group ends with the job."""
        if self.observer is not None:
            self.observer.close()

    def _committed(self, committed: Committed) -> None:
        if self.observer is not None and committed.how is How.REBUILT:
            self.observer.rebuilt(committed.reason or "")

    def _checkpoint_path(self, step: int) -> str:
        return os.path.join(self._config.save or "", f"iter_{step:07d}")

    def _announce(self, finding: Finding) -> None:
        if dist.get_rank() != 0:
            return
        for warning in finding.warnings:
            if warning != finding.reason:
                logger.warning("%s", warning)
        print(f"megatron-ckpt: {finding.reason}.", file=sys.stderr, flush=True)


def _group_timeout(config: CkptExtConfig) -> timedelta | None:
    """Return how long ranks wait for each other; ``None`` without NVRx, where no queue waits for anything."""
    if not installed_mode().asynchronous:
        return None
    from megatron_ckpt_ext.commit.queue import group_timeout
    from megatron_ckpt_ext.integrations.megatron_queue import save_timeout

    return group_timeout(save_timeout(config))
