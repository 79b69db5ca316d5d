"""A warm writer that is tried before training, so that a job without one can still save synchronously."""

from datetime import timedelta

from megatron_ckpt_ext.integrations.megatron_queue import WarmWriter
from megatron_ckpt_ext.strategy.fsdp_dtensor_mode import probed_writer, start_problem
from megatron_ckpt_ext.write.worker import WorkerSettings

__all__ = ["ProbedWarmWriter"]


class ProbedWarmWriter(WarmWriter):
    """A ``WarmWriter`` that does not end the job if no process can be started, but says why there is none."""

    def __init__(self, timeout: timedelta) -> None:
        """Hold nothing. No collectives.

        Args:
            timeout: how long a writer may take without moving a byte.
        """
        super().__init__()
        self._timeout = timeout
        self._problem = ""

    def start(self, settings: WorkerSettings, timeout: timedelta) -> None:
        """Start a writer unless one is held; a failure is what ``probe`` returns."""
        self._problem = ""
        try:
            super().start(settings, timeout)
        except Exception as error:  # becomes a vote after ``probe``: the peers are on their way to it
            self._problem = start_problem(error)

    def probe(self) -> str:
        """Let the held writer do nothing once, and hold it again. No collectives, never raises.

        A writer that could not be started is not tried again; where none was, a new one is.

        Returns:
            Why there is none; empty if there is one.
        """
        if self._problem:
            return self._problem
        self._writer, problem = probed_writer(self.take, self.settings(), self._timeout)
        return problem
