"""Which step a job resumes from, the same on all ranks, and loading it."""

import gc
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from traceback import StackSummary
from typing import Any

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megatron_ckpt_ext.commit.status import reduce_min
from megatron_ckpt_ext.compat.dcp import ERRORS, METADATA_FILE, DistWrapper
from megatron_ckpt_ext.errors import CkptExtError, ConfigurationError
from megatron_ckpt_ext.publish.completeness import verify_checkpoint
from megatron_ckpt_ext.publish.latest import latest_complete_step
from megatron_ckpt_ext.publish.steps import StepPaths

logger = logging.getLogger(__name__)

__all__ = ["Chosen", "LoadFailedError", "choose_step", "load_step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A complete checkpoint to load: plain data, equal on all ranks."""

    step: int
    """Its step."""
    path: str
    """Its directory."""
    skipped: Mapping[str, str]
    """Directories of newer steps that are not complete, newest first, and why each is not."""


class LoadFailedError(CkptExtError, CheckpointException):
    """A checkpoint that could not be loaded; raised on every rank with the same text.

    As those of a save it is torch's ``CheckpointException``, and an ordinary exception.

    Attributes:
        path: of the checkpoint.
        causes: rank -> one sentence.
    """

    def __init__(self, path: str, causes: Mapping[int, str]) -> None:
        """Keep causes as text, so that no tensor lives as long as the error."""
        self.path = path
        self.causes = dict(sorted(causes.items()))
        CheckpointException.__init__(
            self, "load", {rank: (RuntimeError(cause), StackSummary()) for rank, cause in self.causes.items()}
        )

    def __str__(self) -> str:
        """Return the cause of the lowest rank, and how many others failed."""
        rank, cause = next(iter(self.causes.items()))
        others = f" (and {len(self.causes) - 1} more ranks)" if len(self.causes) > 1 else ""
        return (
            f"the checkpoint {self.path!r} could not be loaded on rank {rank}: {cause}{others}. "
            "The state dict may hold a part of it: do not train on from here"
        )

    def __reduce__(self) -> tuple[type["LoadFailedError"], tuple[str, dict[int, str]]]:
        """Cross a process as plain data."""
        return (type(self), (self.path, self.causes))


def choose_step(
    directory: str, *, subdirectory: str = "", step: int | None = None, wrapper: DistWrapper
) -> Chosen | None:
    """Choose the newest complete step, or the one that is asked for; rank 0 decides.

    Called on all ranks: one broadcast of plain data, then, if there is a step, one MIN all_reduce.
    What rank 0 passes over is a warning there, with its reason.

    Args:
        directory: of the steps; the same on all ranks. If it is missing there is no step yet.
        subdirectory: of the checkpoint inside each ``step_N``.
        step: load this one and no other.
        wrapper: of the group of all ranks, with coordinator 0; without a process group this process is the job.

    Returns:
        The step, or ``None`` if none is complete and none was asked for.

    Raises:
        ConfigurationError: on every rank, with the same text: ``step`` is not complete; the directory cannot be used;
            or a rank does not see what rank 0 has chosen.
    """
    answer = wrapper.broadcast_object(_answer(directory, subdirectory, step) if wrapper.is_coordinator else None)
    if answer.refusal:
        raise ConfigurationError(answer.refusal)
    if answer.chosen is not None:
        _check_that_all_see(answer.chosen.path, wrapper)
    return answer.chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What rank 0 tells the others."""

    chosen: Chosen | None = None
    refusal: str = ""
    """Why no step can be chosen, one sentence."""


def _answer(directory: str, subdirectory: str, step: int | None) -> _Answer:
    """Decide, whatever happens: the other ranks are waiting."""
    try:
        paths = StepPaths(directory, subdirectory)
        return _Answer(chosen=_newest(paths) if step is None else _asked(paths, step))
    except ConfigurationError as error:
        return _Answer(refusal=str(error))
    except ERRORS as error:
        return _Answer(refusal=f"no step can be chosen in {directory!r}: {type(error).__name__}: {error}")


def _newest(paths: StepPaths) -> Chosen | None:
    if not Path(paths.directory).exists():
        return None
    found = latest_complete_step(paths.directory, subdirectory=paths.subdirectory)
    skipped = {report.path: report.reason for report in found.skipped}
    for path, reason in skipped.items():
        logger.warning("the checkpoint %s is passed over: %s", path, reason)
    if found.step is None or found.path is None:
        return None
    return Chosen(step=found.step, path=found.path, skipped=skipped)


def _asked(paths: StepPaths, step: int) -> Chosen:
    report = verify_checkpoint(paths.path(step))
    if not report.complete:
        raise ConfigurationError(
            f"step {step} was asked for, but {report.path!r} is not a complete checkpoint: {report.reason}. Ask for "
            "another step, or for none to load the newest complete one"
        )
    return Chosen(step=step, path=report.path, skipped={})


def _check_that_all_see(path: str, wrapper: DistWrapper) -> None:
    nobody = wrapper.get_world_size()
    blind = nobody if os.path.exists(os.path.join(path, METADATA_FILE)) else wrapper.get_rank()
    if wrapper.use_dist:
        [blind] = reduce_min([blind], wrapper.group)
    if blind < nobody:
        raise ConfigurationError(
            f"rank 0 has chosen the checkpoint {path!r}, but rank {blind} sees no {METADATA_FILE} there: keep "
            "checkpoints in a directory that all ranks share"
        )


def load_step(state_dict: dict[str, Any], chosen: Chosen, wrapper: DistWrapper, *, allow_missing: bool = False) -> None:
    """Load a checkpoint into ``state_dict``, in place, and keep no reference to anything in it.

    Called on all ranks, with the same keys: torch gathers and scatters the plans, and gathers who has read.

    Tensors, DTensors among them, are filled where they are; each rank reads its shards, also those of a job with
    another number of ranks. ``Stateful`` objects get ``load_state_dict``. Any other object is replaced by the one that
    was saved: torch unpickles it, so load only checkpoints that you trust.

    Args:
        state_dict: what to fill, nested as it was saved; a checkpoint may hold more.
        chosen: what ``choose_step`` returned.
        wrapper: the one that ``chosen`` was chosen with.
        allow_missing: whether keys that the checkpoint lacks keep their values.

    Raises:
        LoadFailedError: on every rank: it lacks a key, a tensor has another shape, or a file cannot be read.
    """
    causes = _load(state_dict, chosen.path, wrapper, allow_missing)
    if causes:
        gc.collect()  # torch's errors and frames hold each other, and with them what was to be loaded
        raise LoadFailedError(chosen.path, causes)


def _load(state_dict: dict[str, Any], path: str, wrapper: DistWrapper, allow_missing: bool) -> dict[int, str]:
    """Load; return what went wrong on which rank, as plain data."""
    planner = DefaultLoadPlanner(allow_partial_load=allow_missing)
    options: dict[str, Any] = {"process_group": wrapper.group, "no_dist": not wrapper.use_dist}
    try:
        state_dict_loader.load(state_dict, checkpoint_id=path, planner=planner, **options)
    except CheckpointException as error:
        return {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()}
    if allow_missing and planner.metadata is not None and wrapper.is_coordinator:
        for key in sorted(planner.state_dict.keys() - planner.metadata.state_dict_metadata.keys()):
            logger.warning("%r keeps its value: the checkpoint %s does not have it", key, path)
    return {}
