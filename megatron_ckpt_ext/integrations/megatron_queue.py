"""``AsyncSaveQueue`` in the shape that ``megatron.training.async_utils`` asks NVRx's queue for."""

import atexit
import os
from datetime import timedelta
from typing import Any

import torch

from megatron_ckpt_ext.commit.queue import DEFAULT_TIMEOUT, AsyncSaveQueue
from megatron_ckpt_ext.config import CkptExtConfig
from megatron_ckpt_ext.write.worker import WorkerSettings
from megatron_ckpt_ext.write.writer import Writer

__all__ = ["WarmWriter", "megatron_queue", "save_timeout"]


class WarmWriter:
    """Holds the writer process that Megatron starts before training, until the queue takes it. Owns it until then."""

    def __init__(self) -> None:
        """Hold nothing. No collectives."""
        self._settings: WorkerSettings | None = None
        self._writer: Writer | None = None
        atexit.register(self.close)

    def start(self, settings: WorkerSettings, timeout: timedelta) -> None:
        """Start a writer unless one is held, and remember how for later ones."""
        self._settings = settings
        if self._writer is None:
            self._writer = Writer(settings, timeout)

    def settings(self) -> WorkerSettings:
        """Return how to start a writer: as before, or for this rank with defaults."""
        return self._settings or worker_settings(int(os.environ.get("RANK", "0")))

    def take(self, settings: WorkerSettings, timeout: timedelta) -> Writer:
        """Hand the held writer over if it still lives, or start one."""
        writer, self._writer = self._writer, None
        if writer is not None and writer.usable:
            return writer
        if writer is not None:
            writer.close()
        return Writer(settings, timeout)

    def close(self) -> None:
        """End the held writer. Safe to call twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def worker_settings(
    rank: int, *, cpu_priority: int = 10, io_priority: int | None = None, cpu_shm_mode: bool = False
) -> WorkerSettings:
    """Build the settings of one rank's writer: its CUDA device is that of its trainer, unless it needs none."""
    devices = 0 if cpu_shm_mode or not torch.cuda.is_available() else torch.cuda.device_count()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return WorkerSettings(
        rank=rank,
        cuda_device=local_rank % devices if devices else None,
        cpu_priority=cpu_priority,
        io_priority=io_priority,
    )


def save_timeout(config: CkptExtConfig) -> timedelta:
    """Return how long a save may go on without moving a byte."""
    return DEFAULT_TIMEOUT if config.ckpt_save_timeout is None else timedelta(seconds=config.ckpt_save_timeout)


def megatron_queue(warm: WarmWriter, timeout: timedelta) -> type[AsyncSaveQueue]:
    """Build the class that Megatron instantiates. It inspects both signatures, so parameters are named.

    Args:
        warm: keeps what Megatron starts through the class before there is a queue.
        timeout: of ``save_timeout``.
    """

    class MegatronQueue(AsyncSaveQueue):
        """The queue of this job."""

        def __init__(
            self,
            persistent: bool = True,
            is_daemon: bool = True,
            cpu_priority: int = 10,
            io_priority: int | None = None,
            sigterm_timeout: float = 30.0,
            cpu_shm_mode: bool = False,
        ) -> None:
            super().__init__(warm.settings, timeout=timeout, start_writer=warm.take)

        @classmethod
        def warmup_persistent_caller(
            cls,
            rank: int,
            is_daemon: bool = True,
            cpu_priority: int = 10,
            io_priority: int | None = None,
            sigterm_timeout: float = 30.0,
            cpu_shm_mode: bool = False,
            **_options: Any,
        ) -> None:
            """Start the writer before training. No collectives."""
            settings = worker_settings(
                rank, cpu_priority=cpu_priority, io_priority=io_priority, cpu_shm_mode=cpu_shm_mode
            )
            warm.start(settings, timeout)

    return MegatronQueue
