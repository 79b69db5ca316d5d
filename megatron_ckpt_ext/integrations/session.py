"""Everything that outlives one save in a Megatron job, with one owner."""

import logging
import os
import sys
from argparse import Namespace
from typing import Any

import torch.distributed as dist

from megatron_ckpt_ext.commit.commit import Committed, How, OnDrift
from megatron_ckpt_ext.commit.queue import group_timeout
from megatron_ckpt_ext.compat.mcore import TorchDistSaveShardedStrategy
from megatron_ckpt_ext.config import CkptExtConfig
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.integrations.fingerprint import fingerprint_of
from megatron_ckpt_ext.integrations.megatron_queue import save_timeout
from megatron_ckpt_ext.integrations.observer import SaveObserver
from megatron_ckpt_ext.integrations.startup import Action, Finding, agree_on_start, examine
from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

__all__ = ["MegatronSession"]

logger = logging.getLogger(__name__)


class MegatronSession:
    """The package in one Megatron job, from the start of training to ``close``.

    Attributes:
        action: what the job does with prepared metadata.
        observer: records events; ``None`` without ``--ckpt-events``.
    """

    def __init__(self, args: Namespace, config: CkptExtConfig) -> None:
        """Decide with all ranks what this job does.

        Called on all ranks, after Megatron has initialised torch.distributed: one MIN all_reduce, and one new gloo
        group where prepared metadata is used.

        Raises:
            ConfigurationError: on every rank, with the same sentence.
        """
        self._config = config
        self._fingerprint = fingerprint_of(args)
        self._strategy: PreparedSaveStrategy | None = None
        self.observer: SaveObserver | None = None
        self._finding = agree_on_start(self._examine(), config)
        self.action = self._finding.action
        # A CPU group of our own: nothing synchronises the GPU, and nobody else's collectives come in between.
        own_group = self.action is not Action.NOTHING and args.use_gloo_process_groups
        timeout = group_timeout(save_timeout(config))
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if own_group else None
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
        return examine(self._config, self._fingerprint, rank, dist.get_world_size())

    def strategy(self, *args: Any, **kwargs: Any) -> TorchDistSaveShardedStrategy:
        """Build the save strategy where Megatron builds its own, with the same arguments. No collectives."""
        if self.action is Action.NOTHING:
            return TorchDistSaveShardedStrategy(*args, **kwargs)
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

    def written(self) -> tuple[int, int]:
        """Return items and bytes that this rank writes in each save, as far as known. No collectives."""
        prepared = None if self._strategy is None else self._strategy.prepared
        if prepared is None:
            return 0, 0
        locators = prepared.slice.locators
        return len(locators), sum(locator.length for locator in locators.values())

    @property
    def reason(self) -> str | None:
        """Why the next save is planned together, where prepared metadata was asked for; else ``None``."""
        pending = self._strategy is None or self._strategy.prepared is None
        return self._finding.reason if self.action is Action.CREATE and pending else None

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
