"""``PreparedSaveStrategy``: Megatron's ``torch_dist`` save strategy, following a prepared metadata."""

import contextlib
import logging
import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ckpt_ext.commit.commit import Committed, OnDrift, SaveCommit
from megatron_ckpt_ext.commit.common_state import CommonState, CommonStateCheck
from megatron_ckpt_ext.commit.prepared_file import PreparedFile
from megatron_ckpt_ext.compat.dcp import ERRORS
from megatron_ckpt_ext.compat.mcore import (
    COMMON_STATE,
    METADATA_JSON,
    TorchDistSaveShardedStrategy,
    bytes_to_write,
    metadata_json,
    save_planner,
    to_pyt_state_dict,
    uses_shared_memory,
)
from megatron_ckpt_ext.compat.msc import mapped_profile, megatron_uses_msc, object_url
from megatron_ckpt_ext.compat.nvrx import (
    AsyncRequest,
    FileSystemWriterAsync,
    follows_memory,
    has_shared_buffers,
    results_through,
    save_function,
)
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.layout import Item
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.async_plan import PlanResult, failed_plan, save_state_dict_async_plan
from megatron_ckpt_ext.plan.held import Holdings
from megatron_ckpt_ext.write.nothing import write_nothing
from megatron_ckpt_ext.write.snapshot import SHARED_MEMORY, check_room

__all__ = ["PreparedSaveStrategy"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LastPlan:
    """The plan of the save before, and what it was made of."""

    holdings: Holdings
    held: Mapping[Item, str]
    local_plan: Any


class PreparedSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # megatron is untyped
    """A ``TorchDistSaveShardedStrategy`` whose asynchronous saves reuse one layout.

    It is a subclass because ``dist_checkpointing.save`` silently replaces anything else by the stock strategy. Use it
    there, inside ``PreparedSaveWrapper`` or not. Without ``prepared_metadata`` and ``ckpt_metadata_create_path``, and
    for synchronous saves, it is the stock strategy.

    Attributes:
        prepared: the layout that the next save follows; ``None`` before the first save of create mode is published, and
            after a failed save: such a save is planned together.
        thread_count: files that each rank writes.
        preprocess_common: leaves out what may differ between ranks before the common state is compared.
        common_beside: the common state of the next save, where Megatron keeps it out of the sharded state dict.
    """

    thread_count: int

    def __init__(
        self,
        *args: Any,
        prepared_metadata: PreparedMetadata | None = None,
        ckpt_metadata_create_path: str | None = None,
        on_drift: OnDrift = OnDrift.REBUILD,
        fingerprint: Fingerprint | None = None,
        process_group: dist.ProcessGroup | None = None,
        on_commit: Callable[[Committed], None] | None = None,
        results_in_answer: bool = False,
        **kwargs: Any,
    ) -> None:
        """Build the strategy. No collectives.

        Args:
            *args: of ``TorchDistSaveShardedStrategy``.
            prepared_metadata: follow this layout from the first save on.
            ckpt_metadata_create_path: make the prepared file here in the first save, follow it afterwards.
            on_drift: what a save does that does not match the layout.
            fingerprint: settings to record in a new layout.
            process_group: all ranks of the job; by default the default group.
            on_commit: called on each rank with every published save.
            results_in_answer: whether an ``AsyncSaveQueue`` takes the requests; then nothing starts a process for the
                results of writers.
            **kwargs: of ``TorchDistSaveShardedStrategy``.

        Raises:
            ValueError: both a prepared metadata and a path to create one.
        """
        if prepared_metadata is not None and ckpt_metadata_create_path is not None:
            raise ValueError("pass prepared_metadata or ckpt_metadata_create_path, not both")
        super().__init__(*args, **kwargs)
        self.prepared = prepared_metadata
        self._file = _file_of(prepared_metadata, ckpt_metadata_create_path)
        self._is_stock = prepared_metadata is None and ckpt_metadata_create_path is None
        self._on_drift = on_drift
        self._fingerprint = fingerprint
        self._process_group = process_group
        self._on_commit = on_commit
        self._results_in_answer = results_in_answer
        self._common_check = CommonStateCheck()
        self._last_plan: _LastPlan | None = None
        self._has_warned = False
        self.preprocess_common: Callable[[Any], Any] | None = None
        self.common_beside: Any | None = None

    def handles(self, async_strategy: str) -> bool:
        """Whether an asynchronous save with this strategy name goes our way. Equal on all ranks."""
        return async_strategy == "nvrx" and not self._is_stock

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str, async_strategy: str = "nvrx"
    ) -> Any:
        """Plan a save and return the request that writes and finalizes it. Called on all ranks; no collectives."""
        if not self.handles(async_strategy):
            return super().async_save(sharded_state_dict, checkpoint_dir, async_strategy)
        return self.request(sharded_state_dict, checkpoint_dir)

    def request(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: Path | str,
        distribute: Callable[[dict[str, Any], PreparedMetadata], None] | None = None,
    ) -> AsyncRequest:
        """Plan a save that goes our way. Called on all ranks; no collectives.

        Args:
            sharded_state_dict: Megatron's.
            checkpoint_dir: where to save.
            distribute: decides from the layout who writes which replica; changes the state dict.
        """
        common = None
        try:
            if distribute is not None and self.prepared is not None:
                distribute(sharded_state_dict, self.prepared)
            common = self._common_state(sharded_state_dict)
            result = self._plan(sharded_state_dict, checkpoint_dir)
        except ConfigurationError:
            raise
        except ERRORS as error:  # the peers have planned: this rank has to vote, not to leave
            logger.exception("Rank %d cannot plan its part of %s.", dist.get_rank(), checkpoint_dir)
            result = failed_plan(error, self._process_group, self.prepared)
        return self._request(result, common)

    def _plan(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str) -> PlanResult:
        holdings = Holdings.of(sharded_state_dict)
        known = self._last_plan if self._last_plan is not None and self._last_plan.holdings == holdings else None
        if uses_shared_memory(self) and not has_shared_buffers():
            check_room(SHARED_MEMORY, bytes_to_write(sharded_state_dict))
        state_dict = to_pyt_state_dict(sharded_state_dict, keep_only_main_replica=self.keep_only_main_replica)
        with results_through(queue.SimpleQueue()) if self._results_in_answer else contextlib.nullcontext():
            result = save_state_dict_async_plan(
                state_dict,
                self._writer(checkpoint_dir),
                self._process_group,
                planner=save_planner(keep_only_main_replica=self.keep_only_main_replica),
                reuse_metadata_obj=self.prepared,
                held_items=holdings.held() if known is None else known.held,
                local_plan=None if known is None else known.local_plan,
            )
        # Not the planner: it has the state dict, and the trainer may want to move its tensors elsewhere.
        self._last_plan = _LastPlan(holdings, result.global_metadata.held, result.global_metadata.local_plan)
        return result

    def _common_state(self, sharded_state_dict: dict[str, Any]) -> CommonState | None:
        """What is the same on every rank and written by rank 0 only: one object, or ``common.pt`` before 0.19."""
        entry = sharded_state_dict.get(COMMON_STATE)
        data, self.common_beside = self.common_beside if entry is None else entry.data, None
        if data is None:
            return None
        return self._common_check.of(self.preprocess_common(data) if self.preprocess_common else data)

    def _writer(self, checkpoint_dir: Path | str) -> Any:
        if self.separation_hint is not None and self.thread_count <= 1:
            self.thread_count = 2
        url = _object_url(str(checkpoint_dir))
        return FileSystemWriterAsync(
            checkpoint_dir if url is None else url,
            separation_hint=self.separation_hint,
            thread_count=self.thread_count,
            use_msc=url is not None,
            use_cached_data_structure=self._caches(),
            use_cpu_shm_for_gpu_tensors=uses_shared_memory(self),
        )

    def _caches(self) -> bool:
        """Whether the writer may keep the tensors that it has, as a constant structure allows."""
        if not self.use_cached_ckpt_structure or uses_shared_memory(self) or follows_memory():
            return bool(self.use_cached_ckpt_structure)
        if not self._has_warned and dist.get_rank(self._process_group) == 0:
            logger.warning(
                "--ckpt-assume-constant-structure: the writer gets every tensor in each save, since this NVRx does not "
                "notice that a tensor has moved: install nvidia-resiliency-ext 0.7, or use --async-ckpt-use-cpu-shm."
            )
        self._has_warned = True
        return False

    def _request(self, result: PlanResult, common: CommonState | None) -> AsyncRequest:
        function, preload = None, None
        arguments: list[Any] = []
        if result.storage_writer is not None:
            function, preload, arguments = save_function(result.storage_writer)
        commit = SaveCommit(
            *result,
            fingerprint=self._current_fingerprint(),
            file=self._file,
            on_drift=self._on_drift,
            side_files={METADATA_JSON: metadata_json(self.backend, self.version)},
            common=common,
            on_end=self._ended,
            on_commit=self._on_commit,
        )
        return AsyncRequest(function or write_nothing, arguments, [commit], async_fn_kwargs={}, preload_fn=preload)

    def _ended(self, committed: Committed | None) -> None:
        self.prepared = None if committed is None else committed.prepared

    def _current_fingerprint(self) -> Fingerprint:
        known = self._fingerprint or Fingerprint(ckpt_format=self.backend)
        return replace(known, world_size=dist.get_world_size(self._process_group), workers_per_rank=self.thread_count)


def _object_url(directory: str) -> str | None:
    """Return the URL if the checkpoint goes through the multi-storage client: the path says so, as for all we write.

    Raises:
        ConfigurationError: Megatron would look for it elsewhere than where we write it.
    """
    url = object_url(directory)
    if url is None and megatron_uses_msc() and (profile := mapped_profile(directory)) is not None:
        raise ConfigurationError(
            f"the checkpoint directory {directory} is led to the profile {profile} by the path_mapping of the "
            f"multi-storage client: write msc://{profile}/ and the rest in its place, or leave --enable-msc out"
        )
    return url


def _file_of(prepared: PreparedMetadata | None, create_path: str | None) -> PreparedFile | None:
    path = create_path if prepared is None else prepared.path
    return None if path is None else PreparedFile(path)
