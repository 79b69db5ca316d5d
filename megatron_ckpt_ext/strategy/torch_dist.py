"""``PreparedSaveStrategy``: Megatron's ``torch_dist`` save strategy, following a prepared metadata."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ckpt_ext.commit.finalize import save_state_dict_async_finalize
from megatron_ckpt_ext.compat.mcore import TorchDistSaveShardedStrategy, save_planner, to_pyt_state_dict
from megatron_ckpt_ext.compat.nvrx import AsyncRequest, FileSystemWriterAsync
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.async_plan import PlanResult, save_state_dict_async_plan
from megatron_ckpt_ext.plan.held import held_in_sharded_state_dict
from megatron_ckpt_ext.write.nothing import write_nothing

__all__ = ["PreparedSaveStrategy"]


class PreparedSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # megatron is untyped
    """A ``TorchDistSaveShardedStrategy`` whose asynchronous saves reuse one layout.

    It is a subclass because ``dist_checkpointing.save`` silently replaces anything else by the stock strategy. Use
    it there, inside ``FullyParallelSaveStrategyWrapper`` or not. Without ``prepared_metadata`` and
    ``ckpt_metadata_create_path``, and for synchronous saves, it is the stock strategy.

    Attributes:
        prepared: the layout that saves follow; in create mode ``None`` until the first save is published.
        thread_count: files that each rank writes.
    """

    thread_count: int

    def __init__(
        self,
        *args: Any,
        prepared_metadata: PreparedMetadata | None = None,
        ckpt_metadata_create_path: str | None = None,
        fingerprint: Fingerprint | None = None,
        process_group: dist.ProcessGroup | None = None,
        on_create: Callable[[PreparedMetadata], None] | None = None,
        **kwargs: Any,
    ) -> None:
        """Build the strategy. No collectives.

        Args:
            *args: of ``TorchDistSaveShardedStrategy``.
            prepared_metadata: follow this layout from the first save on.
            ckpt_metadata_create_path: make the prepared file here in the first save, follow it afterwards.
            fingerprint: settings to record in that file.
            process_group: all ranks of the job; by default the default group.
            on_create: called on each rank once the prepared metadata is there.
            **kwargs: of ``TorchDistSaveShardedStrategy``.

        Raises:
            ValueError: both a prepared metadata and a path to create one.
        """
        if prepared_metadata is not None and ckpt_metadata_create_path is not None:
            raise ValueError("pass prepared_metadata or ckpt_metadata_create_path, not both")
        super().__init__(*args, **kwargs)
        self.prepared = prepared_metadata
        self._create_path = ckpt_metadata_create_path
        self._fingerprint = fingerprint
        self._process_group = process_group
        self._on_create = on_create

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str, async_strategy: str = "nvrx"
    ) -> Any:
        """Plan a save and return the request that writes and finalizes it.

        Called on all ranks. No collectives while it follows a prepared metadata; one gather_object otherwise.
        """
        if async_strategy != "nvrx" or (self.prepared is None and self._create_path is None):
            return super().async_save(sharded_state_dict, checkpoint_dir, async_strategy)
        held = held_in_sharded_state_dict(sharded_state_dict)
        state_dict = to_pyt_state_dict(sharded_state_dict, keep_only_main_replica=self.keep_only_main_replica)
        result = save_state_dict_async_plan(
            state_dict,
            self._writer(checkpoint_dir),
            self._process_group,
            planner=save_planner(keep_only_main_replica=self.keep_only_main_replica),
            reuse_metadata_obj=self.prepared,
            held_items=held,
        )
        return self._request(result)

    def _writer(self, checkpoint_dir: Path | str) -> Any:
        if self.separation_hint is not None and self.thread_count <= 1:
            self.thread_count = 2
        return FileSystemWriterAsync(
            checkpoint_dir,
            separation_hint=self.separation_hint,
            thread_count=self.thread_count,
            use_cached_data_structure=self.use_cached_ckpt_structure,
            use_cpu_shm_for_gpu_tensors=self.cpu_shm_mode,
        )

    def _request(self, result: PlanResult) -> AsyncRequest:
        function, preload, arguments = result.storage_writer.get_save_function_and_args()
        return AsyncRequest(
            function or write_nothing,
            arguments,
            [lambda: self._finalize(result)],
            async_fn_kwargs={},
            preload_fn=preload,
        )

    def _finalize(self, result: PlanResult) -> None:
        followed = result.global_metadata.prepared
        created = save_state_dict_async_finalize(
            *result,
            reuse_metadata_obj=followed,
            create_metadata_path=self._create_path if followed is None else None,
            fingerprint=self._current_fingerprint(),
        )
        if followed is None and created is not None:
            self.prepared = created
            if self._on_create is not None:
                self._on_create(created)

    def _current_fingerprint(self) -> Fingerprint:
        known = self._fingerprint or Fingerprint(ckpt_format=self.backend)
        return replace(known, world_size=dist.get_world_size(self._process_group), workers_per_rank=self.thread_count)
