"""``PreparedCheckpointManager``: Bridge's checkpoint manager, whose saves follow prepared metadata."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.bridge.training.checkpointing import (
    CheckpointLoadContext,
    CheckpointSaveContext,
    DefaultCheckpointManager,
)

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.integrations.bridge.as_saved import StateAsSaved
from megatron_ckpt_ext.integrations.bridge.job import BridgeJob

__all__ = ["PreparedCheckpointManager"]


class PreparedCheckpointManager(DefaultCheckpointManager):  # type: ignore[misc]  # Bridge is untyped
    """A ``DefaultCheckpointManager``: Bridge's own saves and loads, with our strategy, queue, trackers and retention.

    ``with_ckpt_ext`` makes it the ``custom_manager_class`` of a configuration.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        """Decide with all ranks what the job does. Called on all ranks; collectives as ``MegatronSession``.

        Args:
            checkpoint_config: a ``CkptExtCheckpointConfig``.

        Raises:
            ConfigurationError: on every rank: another configuration, or settings that do not fit this job.
        """
        super().__init__(checkpoint_config)
        job = getattr(checkpoint_config, "job", None)
        if job is None:
            raise ConfigurationError(
                f"checkpoint.custom_manager_class names {type(self).__name__}, but the configuration has none of its "
                "settings: call with_ckpt_ext(cfg), of megatron_ckpt_ext.integrations.bridge, before applying overrides"
            )
        self._job: BridgeJob = job
        self._job.start()

    def save(self, ctx: CheckpointSaveContext, callback_manager: Any) -> None:
        """Save, as Bridge does it. Called on all ranks.

        Asynchronous saves that follow prepared metadata have no collectives of ours. Bridge's own are a barrier at the
        end of each save, and one when it is finalized.
        """
        step = int(ctx.state.train_state.step)
        if self.checkpoint_config.async_save:
            ctx = replace(ctx, state=StateAsSaved(ctx.state))
        save = super().save
        self._job.save(step, lambda: save(ctx, callback_manager))

    def load(self, ctx: CheckpointLoadContext) -> tuple[int, int]:
        """Load, as Bridge does it. Called on all ranks; collectives of Bridge's load.

        Shards of ``fsdp_dtensor`` are placed by one exchange: Bridge gathers for each tensor of a rank, and ranks that
        hold different numbers of them wait for each other for ever.

        Returns:
            The step, and the floating point operations so far; zeros if nothing was loaded.
        """
        load: Callable[..., tuple[int, int]] = super().load
        return self._job.load(lambda: load(ctx))

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Finalize what is written. Called on all ranks: one MIN all_reduce a poll while saves are in flight.

        Raises:
            SaveFailedError: on every rank: a save failed.
        """
        queue = state.async_calls_queue
        finalize = super().finalize_async_saves
        self._job.finalize(
            lambda: finalize(state, blocking=blocking, terminate=terminate),
            lambda: 0 if queue is None else int(queue.get_num_unfinalized_calls()),
        )
