"""On real ranks: one training job's asynchronous saves, by stock megatron-core with NVRx or by us, step by step.

Both go the way of ``megatron.training`` with ``--async-save --use-persistent-ckpt-worker
--ckpt-assume-constant-structure --ckpt-fully-parallel-save --async-ckpt-use-cpu-shm``: the strategy inside the
fully-parallel wrapper, the first save of a job validated, one writer process a rank, tensors staged in shared memory
that is used again. Imported by the ranks only, inside the CPU emulation: stock finalize asks for a CUDA device.
"""

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import get_write_results_queue
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_ckpt_ext.commit.commit import Committed, How
from megatron_ckpt_ext.commit.queue import AsyncSaveQueue
from megatron_ckpt_ext.compat.mcore import FullyParallelSaveStrategyWrapper, TorchDistSaveShardedStrategy
from megatron_ckpt_ext.integrations.dist_checkpointing import DistCheckpointing
from megatron_ckpt_ext.integrations.megatron_queue import worker_settings
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.strategy.fully_parallel import PreparedSaveWrapper
from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

__all__ = ["AsynchronousJob", "OurJob", "StockJob"]

DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.005


class AsynchronousJob(ABC):
    """Saves of one side. Owns a queue and its writer process; ``close`` ends them. Called on all ranks."""

    def __init__(self, directory: str, workers: int) -> None:
        """Begin a job whose files are in ``directory``; each rank writes ``workers`` files."""
        self.directory = directory
        self.workers = workers
        self._saved = False
        self.strategy: Any = None
        self.queue: Any = None

    def resume(self) -> None:
        """Begin again, as a job does that was restarted: with a new strategy, and what it reads at start-up."""
        self._saved = False
        self.strategy = self.new_strategy()

    def save(self, state_dict: dict[str, Any], folder: Path) -> Any:
        """Plan and snapshot a save; return its request."""
        request = self.save_function()(
            state_dict,
            str(folder),
            self.strategy,
            validate_access_integrity=not self._saved,
            async_sharded_save=True,
            content_metadata={},
        )
        self._saved = True
        return request

    def schedule(self, request: Any) -> None:
        """Hand a save over to the writer process."""
        self.queue.schedule_async_request(request)

    def poll(self) -> bool:
        """Look once after the save in flight, as training does in every iteration; return whether it is finished."""
        self.queue.maybe_finalize_async_calls(blocking=False)
        return bool(self.queue.get_num_unfinalized_calls() == 0)

    def close(self) -> None:
        """End the writer process."""
        self.queue.close()

    @abstractmethod
    def new_strategy(self) -> Any:
        """Build the strategy of a job that begins."""

    @abstractmethod
    def save_function(self) -> Any:
        """Return ``dist_checkpointing.save`` as Megatron calls it."""

    @abstractmethod
    def wait_written(self) -> None:
        """Wait until this rank's writer has ended the save in flight. No collectives."""

    def check(self, folder: Path) -> None:
        """Refuse to report a save that went another way than the one to be measured."""
        if not (folder / ".metadata").exists():
            raise RuntimeError(f"the save left no .metadata in {folder}")


class StockJob(AsynchronousJob):
    """megatron-core and NVRx as they are."""

    def __init__(self, directory: str, workers: int) -> None:
        """Start the writer's results queue as Megatron does at start-up, and the job."""
        super().__init__(directory, workers)
        get_write_results_queue(mp_mode="fork")
        self.queue = AsyncCallsQueue(persistent=True, cpu_shm_mode=True)
        self.last: Path | None = None

    def new_strategy(self) -> Any:
        """Build what Megatron builds; a resumed job also plugs in what the loader read."""
        base = TorchDistSaveShardedStrategy(thread_count=self.workers, cached_metadata=True, cpu_shm_mode=True)
        if self.last is not None:
            base.cached_global_metadata = FileSystemReader(self.last).read_metadata()
        return FullyParallelSaveStrategyWrapper(base, None, True)

    def save_function(self) -> Any:
        """Return the real one."""
        return dist_checkpointing.save

    def wait_written(self) -> None:
        """Wait for the message that the next poll takes, unless an earlier one took it already."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        caller = self.queue.persistent_caller
        while caller.cur_item is None and caller.comp_q.empty():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the writer of rank {dist.get_rank()} did not end within {DEADLINE_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def check(self, folder: Path) -> None:
        """Keep the checkpoint in mind that a resumed job loads."""
        super().check(folder)
        self.last = folder


class OurJob(AsynchronousJob):
    """The extension, following the prepared file of an earlier job."""

    def __init__(self, directory: str, workers: int) -> None:
        """Build the queue of a Megatron job."""
        super().__init__(directory, workers)
        get_write_results_queue(mp_mode="fork")
        self.file = str(Path(directory, "prepared.metadata"))
        self.published: list[Committed] = []
        self.queue = AsyncSaveQueue(lambda: worker_settings(dist.get_rank(), cpu_shm_mode=True))
        self._module: Any = DistCheckpointing(dist_checkpointing)

    def new_strategy(self) -> Any:
        """Read this rank's part of the prepared file; without one the first save makes it."""
        exists = Path(self.file).exists()
        prepared = PreparedMetadata.load(self.file, dist.get_rank(), dist.get_world_size()) if exists else None
        base = PreparedSaveStrategy(
            thread_count=self.workers,
            cached_metadata=True,
            cpu_shm_mode=True,
            prepared_metadata=prepared,
            ckpt_metadata_create_path=None if exists else self.file,
            on_commit=self.published.append,
        )
        return PreparedSaveWrapper(base, None, True)

    def save_function(self) -> Any:
        """Return what the extension puts into Megatron."""
        return self._module.save

    def wait_written(self) -> None:
        """Wait for the writer; nothing is finalized."""
        self.queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    def check(self, folder: Path) -> None:
        """Look how the layout was found."""
        super().check(folder)
        how = self.published[-1].how
        if how is not How.REUSED and len(self.published) > 1:
            raise RuntimeError(f"the save in {folder} was {how}, so it does not measure one that is reused")
