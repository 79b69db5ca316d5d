"""A warm writer that is tried before training, so that a job without one can still save synchronously."""

import logging
from datetime import timedelta

from megatron_ckpt_ext.integrations.megatron_queue import WarmWriter
from megatron_ckpt_ext.strategy.fsdp_dtensor_mode import probed_writer
from megatron_ckpt_ext.write.worker import WorkerSettings

__all__ = ["ProbedWarmWriter"]

logger = logging.getLogger(__name__)


class ProbedWarmWriter(WarmWriter):
    """A ``WarmWriter`` that does not end the job if no process can be started, but says why there is none."""

    def __init__(self, timeout: timedelta) -> None:
        """Hold nothing. No collectives.

        Args:
            timeout: how long a writer may take without moving a byte.
        """
        super().__init__()
        self._timeout = timeout

    def start(self, settings: WorkerSettings, timeout: timedelta) -> None:
        """Start a writer unless one is held; a failure shows again in ``probe``."""
        try:
            super().start(settings, timeout)
        except Exception as error:  # becomes a vote in ``probe``: the peers are on their way to it
            logger.warning("No checkpoint writer process: %s: %s.", type(error).__name__, error)

    def probe(self) -> str:
        """Let the held writer, or a new one, do nothing once, and hold it again. No collectives, never raises.

        Returns:
            Why there is none; empty if there is one.
        """
        self._writer, problem = probed_writer(self.take, self.settings(), self._timeout)
        return problem
