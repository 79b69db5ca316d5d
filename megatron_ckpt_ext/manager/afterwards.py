"""What follows a publish: the record of it, retention, and the trainer's hook."""

import logging
import time
from collections.abc import Callable

from megatron_ckpt_ext.commit.commit import Committed
from megatron_ckpt_ext.manager.accounting import Accounting, Save
from megatron_ckpt_ext.manager.config import ManagerConfig
from megatron_ckpt_ext.publish.judge import RememberingJudge
from megatron_ckpt_ext.publish.retention import KeepAny, KeepInterval, KeepLast, RetentionPolicy, retain
from megatron_ckpt_ext.publish.steps import StepPaths

__all__ = ["Afterwards", "policy_of"]

logger = logging.getLogger(__name__)


class Afterwards:
    """Runs on each rank, on the thread that finds a save durable. What fails here costs no checkpoint."""

    def __init__(
        self,
        paths: StepPaths,
        policy: RetentionPolicy | None,
        on_saved: Callable[[int], None] | None,
        accounting: Accounting,
    ) -> None:
        """Keep what is to be done.

        Args:
            paths: of the steps.
            policy: what this rank keeps; ``None``: it removes nothing.
            on_saved: the trainer's hook.
            accounting: where it is recorded.
        """
        self._paths = paths
        self._policy = policy
        self._on_saved = on_saved
        self._accounting = accounting
        self._judge = RememberingJudge()
        self._abandoned: set[int] = set()

    def resumed(self, step: int) -> None:
        """Leave the steps ahead of ``step`` to the life of the job that made them. No save is in flight."""
        if self._policy is not None:
            self._abandoned = {each for each in self._paths.steps() if each > step}

    def durable(self, save: Save, committed: Committed) -> None:
        """Do what follows the publish of a save. No collectives, never raises an ``Exception``."""
        self._accounting.durable(save, committed)
        self._abandoned.discard(save.step)
        if self._policy is not None:
            self._retain(save, self._policy)
        if self._on_saved is not None:
            try:
                self._on_saved(save.step)
            except Exception:
                logger.exception("on_saved(%d) failed; the checkpoint is durable all the same.", save.step)

    def _retain(self, save: Save, policy: RetentionPolicy) -> None:
        began = time.monotonic()
        try:
            report = retain(
                self._paths.directory,
                policy,
                finalized=save.step,
                subdirectory=self._paths.subdirectory,
                abandoned=self._abandoned,
                judge=self._judge,
            )
        except Exception as error:
            logger.exception("Older checkpoints in %s were not removed.", self._paths.directory)
            self._accounting.retained(save, began, removed=0, reason=f"{type(error).__name__}: {error}")
            return
        reason = "; ".join(f"step {step}: {why}" for step, why in report.failed.items()) or None
        self._accounting.retained(save, began, removed=len(report.removed), reason=reason)


def policy_of(config: ManagerConfig) -> RetentionPolicy | None:
    """Return what a job keeps; ``None``: everything."""
    policies: list[RetentionPolicy] = []
    if config.keep_last is not None:
        policies.append(KeepLast(config.keep_last))
    if config.keep_interval is not None:
        policies.append(KeepInterval(config.keep_interval))
    return KeepAny(tuple(policies)) if policies else None
