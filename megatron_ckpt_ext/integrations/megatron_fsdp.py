"""``--ckpt-format fsdp_dtensor`` in Megatron-LM: ``FsdpDtensorSaver`` saves, and one exchange is all its gathers.

Megatron plans these saves in ``save_checkpoint`` itself, with names that it looks up in ``checkpointing``.
"""

import inspect
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megatron_ckpt_ext.commit.commit import Committed, OnDrift
from megatron_ckpt_ext.compat.dcp import DistWrapper
from megatron_ckpt_ext.compat.megatron_sites import FSDP_SITES, find_sites
from megatron_ckpt_ext.config import CkptExtConfig
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.integrations.fingerprint import files_per_rank
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.plan.dtensor_uneven import place_uneven_shards
from megatron_ckpt_ext.replacements import Replacement, Replacements
from megatron_ckpt_ext.strategy.fsdp_dtensor import FsdpDtensorSaver
from megatron_ckpt_ext.strategy.fsdp_dtensor_mode import Mode, agree_on_mode, decide_mode, find_facts

if TYPE_CHECKING:
    from megatron_ckpt_ext.integrations.fsdp_writer import ProbedWarmWriter

__all__ = [
    "Destination",
    "MegatronFsdp",
    "dtensor_fingerprint",
    "fsdp_hooks",
    "installed_mode",
    "placing",
    "returning",
    "save_synchronously",
    "unchecked",
]

logger = logging.getLogger(__name__)


class Destination:
    """Stands in for the writer that ``save_checkpoint`` builds: only the directory counts, the saver knows the rest."""

    def __init__(self, path: str, *, use_cpu_shm_for_gpu_tensors: bool = False, **_options: Any) -> None:
        """Keep the directory; Megatron looks for the option by its name."""
        self.path = str(path)


class MegatronFsdp:
    """The ``fsdp_dtensor`` saves and loads of one Megatron job.

    Attributes:
        saver: plans and ends the saves; ``None`` if the job saves none asynchronously that we handle.
    """

    def __init__(self, saver: FsdpDtensorSaver | None, group: dist.ProcessGroup | None) -> None:
        """Keep what the job uses. No collectives.

        Args:
            saver: of this job.
            group: all ranks of the job.
        """
        self.saver = saver
        self._group = group
        self._is_saving = False

    @classmethod
    def start(
        cls,
        args: Namespace,
        config: CkptExtConfig,
        *,
        group: dist.ProcessGroup | None,
        fingerprint: Fingerprint,
        prepared: PreparedMetadata | None,
        on_commit: Callable[[Committed], None],
        warm: "ProbedWarmWriter | None",
        earlier_fallback: str | None = None,
    ) -> "MegatronFsdp":
        """Decide how the job saves. Called on all ranks, before training: collectives of ``agree_on_mode``.

        A job that falls back loses ``args.async_save`` here, as with Megatron's own check of it: before its first save,
        on all ranks, so that its tracker, retention and clean-up are those of synchronous saves.

        Args:
            args: Megatron's.
            config: what was asked for.
            group: all ranks of the job.
            fingerprint: of the job.
            prepared: the layout to follow.
            on_commit: called with every published save.
            warm: the writer process that Megatron has started.
            earlier_fallback: why saves were synchronous before an in-process restart.

        Raises:
            ConfigurationError: on every rank: the job falls back, and something needs asynchronous saves.
        """
        if not config.saves_dtensors:
            return cls(None, group)
        facts = find_facts(async_save=True)
        if decide_mode(facts).asynchronous:
            facts = replace(facts, problem=_problem(args, warm, earlier_fallback))
        mode = agree_on_mode(decide_mode(facts), DistWrapper(group, True, 0))
        if not mode.asynchronous:
            if warm is not None:
                warm.close()
            save_synchronously(args, mode.reason)
        saver = FsdpDtensorSaver(
            process_group=group,
            prepared_metadata=prepared,
            ckpt_metadata_create_path=config.ckpt_metadata if prepared is None else None,
            on_drift=OnDrift(config.ckpt_metadata_on_drift),
            uneven=True,
            fingerprint=fingerprint,
            thread_count=files_per_rank(args),
            use_cpu_shm=bool(getattr(args, "async_ckpt_use_cpu_shm", False)),
            mode=mode,
            on_commit=on_commit,
        )
        return cls(saver, group)

    @property
    def reason(self) -> str | None:
        """Why saves are not asynchronous, if they should be."""
        return self.saver.mode.reason if self.saver is not None and self.saver.mode.is_fallback else None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around ``save_checkpoint``: its gathers are left out, and where we fall back torch's ``save`` is ours."""
        stand_in = [(dcp, "save", self._save_now)] if self._falls_back else []
        self._is_saving = True
        try:
            with Replacements() as replacements:
                replacements.apply(stand_in)
                yield
        finally:
            self._is_saving = False

    def place(self, state_dict: Mapping[str, Any]) -> None:
        """Place uneven shards before a load, or a save that is not ours; in ours the saver does it.

        Called on all ranks: one gather_object and one scatter_object_list, none in our saves.
        """
        if not (self._is_saving and self.saver is not None):
            place_uneven_shards(state_dict, DistWrapper(self._group, True, 0))

    def request(self, state_dict: Mapping[str, Any], writer: Destination, *_args: Any, **_options: Any) -> Any:
        """Plan an asynchronous save, where ``save_checkpoint`` plans its own; collectives as ``FsdpDtensorSaver``."""
        if self.saver is None:
            raise RuntimeError("this job has no saver for fsdp_dtensor")
        return self.saver.request(state_dict, writer.path, results_in_answer=True)

    @property
    def requests(self) -> bool:
        """Whether asynchronous saves of this job are ours."""
        return self.saver is not None and self.saver.mode.asynchronous

    @property
    def _falls_back(self) -> bool:
        return self.saver is not None and not self.saver.mode.asynchronous

    def _save_now(self, state_dict: Mapping[str, Any], *, storage_writer: Any = None, **_options: Any) -> None:
        if self.saver is not None:
            self.saver.save(state_dict, storage_writer.path)


def fsdp_hooks(running: Callable[[], MegatronFsdp | None]) -> Iterator[Replacement]:
    """Return what is to be replaced in Megatron for ``fsdp_dtensor``.

    Args:
        running: returns that of the running job; ``None``: all is stock.
    """
    sites, missing = find_sites(FSDP_SITES)
    if missing:  # Megatron-FSDP cannot be imported, or has moved: a job that asks for it is told at its start
        return
    from megatron.core.transformer import fsdp_dtensor_checkpoint

    yield sites["state"].replaced(lambda stock: placing(stock, running))
    build = fsdp_dtensor_checkpoint.make_fsdp_dtensor
    yield fsdp_dtensor_checkpoint, "make_fsdp_dtensor", unchecked(build, running)
    yield sites["strategy"].replaced(lambda stock: _choosing(stock, running))
    yield sites["finalize"].replaced(returning)


def installed_mode() -> Mode:
    """Decide for this rank from what is installed alone. No collectives."""
    return decide_mode(find_facts(async_save=True))


def _problem(args: Namespace, warm: "ProbedWarmWriter | None", earlier_fallback: str | None) -> str:
    if not args.async_save:  # after an in-process restart of a job that has fallen back
        return earlier_fallback or "Megatron was started with synchronous saves"
    return "no writer process was started" if warm is None else warm.probe()


def save_synchronously(args: Namespace, reason: str) -> None:
    """Set what Megatron's ``validate_args`` sets where saves are not asynchronous. No collectives.

    Args:
        args: Megatron's.
        reason: why they are not.

    Raises:
        ConfigurationError: something needs asynchronous saves, which ``validate_args`` asserts.
    """
    logits = getattr(args, "logits_save_dir", None)
    if logits is not None:
        raise ConfigurationError(
            f"--logits-save-dir {logits} was given, but asynchronous saves, which write the logits, are not possible: "
            f"{reason}. Leave it out, or put that right"
        )
    args.async_save, args.async_strategy = False, "mcore"


def dtensor_fingerprint(fingerprint: Fingerprint) -> Fingerprint:
    """Return the fingerprint of a job with what is different in ``fsdp_dtensor``."""
    return replace(fingerprint, optimizer_sharding="fsdp_dtensor")


def placing(stock: Callable[..., Any], running: Callable[[], MegatronFsdp | None]) -> Callable[..., Any]:
    """Wrap what places uneven shards with a gather for each tensor: ``MegatronFsdp.place`` does it, or the saver."""

    @wraps(stock)
    def preprocess_state_dict_for_uneven_dtensor(state_dict: Any) -> Any:
        job = running()
        if job is None:
            return stock(state_dict)
        job.place(state_dict)
        return state_dict

    return preprocess_state_dict_for_uneven_dtensor


def unchecked(stock: Callable[..., Any], running: Callable[[], MegatronFsdp | None]) -> Callable[..., Any]:
    """Wrap ``make_fsdp_dtensor``: its check and its chunks gather for each tensor; the exchange does both at once."""

    @wraps(stock)
    def make_fsdp_dtensor(*args: Any, **options: Any) -> Any:
        if running() is not None:
            bound = inspect.signature(stock).bind(*args, **options)
            bound.arguments |= {"run_check": False, "update_uneven_dtensor_chunk_meta": False}
            args, options = bound.args, bound.kwargs
        return stock(*args, **options)

    return make_fsdp_dtensor


def _choosing(stock: Callable[..., Any], running: Callable[[], MegatronFsdp | None]) -> Callable[..., Any]:
    @wraps(stock)
    def get_async_strategy(name: str = "nvrx", module: str | None = None) -> tuple[str, Any]:
        name, found = stock(name, module)
        job = running()
        if module is None and job is not None and job.requests:
            found = {**found, "FileSystemWriterAsync": Destination, "save_state_dict_async_plan": job.request}
        return name, found

    return get_async_strategy


def returning(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what makes a request of a plan: what ``MegatronFsdp.request`` planned is one already."""

    @wraps(stock)
    def get_save_and_finalize_callbacks(writer: Any, planned: Any, *rest: Any, **options: Any) -> Any:
        return planned if isinstance(writer, Destination) else stock(writer, planned, *rest, **options)

    return get_save_and_finalize_callbacks
