"""``RunningJob``: what stands in for the names of one training job, in Megatron-LM and in Megatron-Bridge."""

from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from megatron_ckpt_ext.config import CkptExtConfig
from megatron_ckpt_ext.integrations.session import MegatronSession

if TYPE_CHECKING:
    from megatron_ckpt_ext.integrations.fsdp_writer import ProbedWarmWriter
    from megatron_ckpt_ext.integrations.megatron_queue import WarmWriter
    from megatron_ckpt_ext.integrations.observer import SaveObserver

__all__ = ["RunningJob"]


class RunningJob:
    """The package in the jobs of one process. Owns the writers that are started before training, and the session.

    Attributes:
        config: what was asked for.
        session: the package in the running job; ``None`` before the training framework is initialised.
    """

    def __init__(self) -> None:
        """Hold nothing. No collectives."""
        self.config = CkptExtConfig()
        self.session: MegatronSession | None = None
        self._warm: WarmWriter | None = None
        self._probed: ProbedWarmWriter | None = None

    def start(self, args: Namespace) -> MegatronSession:
        """Begin the session, in place of one before an in-process restart. Called on all ranks, as ``MegatronSession``.

        Args:
            args: Megatron's, or what says the same.

        Raises:
            ConfigurationError: on every rank, with the same sentence.
        """
        earlier_fallback = None
        if self.session is not None:
            earlier_fallback = self.session.fallback
            self.session.close()
        self.session = MegatronSession(args, self.config, self._probed, earlier_fallback)
        return self.session

    def close(self) -> None:
        """End the session and the writers that no queue has taken. Safe to call twice."""
        for warm in (self._warm, self._probed):
            if warm is not None:
                warm.close()
        if self.session is not None:
            self.session.close()

    @property
    def saves(self) -> bool:
        """Whether saves of the running job are ours."""
        return self.session is not None and self.session.saves

    @property
    def observer(self) -> "SaveObserver | None":
        """Records events; ``None`` if none are asked for."""
        return None if self.session is None else self.session.observer

    def choosing(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap mcore's ``get_async_strategy`` where a queue is built from it."""
        ours: dict[str, Callable[[Any], Any]] = {
            "AsyncCallsQueue": lambda _theirs: self._queue_class(),
            "get_write_results_queue": self._results_queue,
        }

        @wraps(stock)
        def get_async_strategy(name: str = "nvrx", module: str | None = None) -> tuple[str, Any]:
            name, found = stock(name, module)
            if self.config.saves_dtensors or (name == "nvrx" and self.config.owns_queue):
                if module is None:
                    found = {**found, **{each: replace(found[each]) for each, replace in ours.items()}}
                elif module in ours:
                    found = ours[module](found)
            return name, found

        return get_async_strategy

    def strategy(self, *args: Any, **options: Any) -> Any:
        """Build the save strategy, in place of ``TorchDistSaveShardedStrategy``."""
        from megatron_ckpt_ext.compat.mcore import TorchDistSaveShardedStrategy

        build = TorchDistSaveShardedStrategy if self.session is None else self.session.strategy
        return build(*args, **options)

    def wrapper(self, strategy: Any, *args: Any, **options: Any) -> Any:
        """Build what distributes a save among replicas, in place of ``FullyParallelSaveStrategyWrapper``."""
        from megatron_ckpt_ext.compat.mcore import FullyParallelSaveStrategyWrapper
        from megatron_ckpt_ext.strategy.fully_parallel import PreparedSaveWrapper
        from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

        ours = isinstance(strategy, PreparedSaveStrategy)
        build = PreparedSaveWrapper if ours else FullyParallelSaveStrategyWrapper
        return build(strategy, *args, **options)

    def save(self, step: int, save: Callable[[], Any]) -> Any:
        """Run a save of ``step``; called on all ranks, as the save is."""
        session = self.session
        if session is None:
            return save()
        with session.saving():
            if session.observer is None:
                return save()
            return session.observer.saving(step, save, reason=session.reason, fallback=session.fallback)

    def schedule(self, schedule: Callable[[], Any]) -> Any:
        """Hand a save over to the queue, inside ``save``."""
        return schedule() if self.observer is None else self.observer.scheduling(schedule)

    def finalize(self, finalize: Callable[[], Any], unfinalized: Callable[[], int]) -> Any:
        """Finalize what is written; called on all ranks, as the finalizing is.

        Args:
            finalize: the call.
            unfinalized: how many saves are in flight.
        """
        session = self.session
        if session is None or session.observer is None:
            return finalize()
        return session.observer.finalizing(finalize, unfinalized, session.written)

    def _queue_class(self) -> type:
        from megatron_ckpt_ext.integrations.fsdp_writer import ProbedWarmWriter
        from megatron_ckpt_ext.integrations.megatron_queue import WarmWriter, megatron_queue, save_timeout

        timeout = save_timeout(self.config)
        if self.config.saves_dtensors:
            if self._probed is None:
                self._probed = ProbedWarmWriter(timeout)
            return megatron_queue(self._probed, timeout)
        if self._warm is None:
            self._warm = WarmWriter()
        return megatron_queue(self._warm, timeout)

    def _results_queue(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron forks a process for the results of writers before training; in ours they come in the answers."""

        @wraps(stock)
        def get_write_results_queue(mp_mode: str = "spawn") -> Any:
            in_answers = self.config.ckpt_metadata is not None or self.config.saves_dtensors
            return None if in_answers else stock(mp_mode="spawn")

        return get_write_results_queue
