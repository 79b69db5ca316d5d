"""Asynchronous or not: one decision a job, from what is installed and asked for, the same on all ranks."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from megatron_ckpt_ext.commit.status import reduce_min
from megatron_ckpt_ext.compat.megatron_training import nvrx_version, unsupported_nvrx
from megatron_ckpt_ext.write.nothing import write_nothing
from megatron_ckpt_ext.write.worker import Call, WorkerSettings
from megatron_ckpt_ext.write.writer import Writer

__all__ = ["Facts", "Mode", "agree_on_mode", "decide_mode", "find_facts", "probed_writer", "start_problem"]

logger = logging.getLogger(__name__)

_PROBE = -1
"""Number of the call that only shows that a writer works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """How a job saves."""

    asynchronous: bool
    """Whether a save returns before it is written."""
    reason: str
    """Why, one sentence."""
    is_fallback: bool = False
    """Whether asynchronous saves were asked for and there will be none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What one rank knows: plain data."""

    async_save: bool
    """Whether asynchronous saves were asked for."""
    nvrx: str | None
    """Installed version of nvidia-resiliency-ext, ``None`` if it is not installed."""
    problem: str = ""
    """Why NVRx cannot be imported, or no writer process can be started."""


def decide_mode(facts: Facts) -> Mode:
    """Decide for one rank. Pure; no collectives."""
    if not facts.async_save:
        return Mode(asynchronous=False, reason="asynchronous saves were not asked for")
    unsupported = unsupported_nvrx(facts.nvrx)
    if unsupported is not None:
        return _fallback(unsupported)
    if facts.problem:
        return _fallback(facts.problem)
    return Mode(asynchronous=True, reason="asynchronous saves were asked for")


def find_facts(*, async_save: bool, version: Callable[[], str | None] = nvrx_version) -> Facts:
    """Look at what is installed; a version that is not supported is not imported. No collectives, never raises."""
    installed = version() if async_save else None
    problem = ""
    if unsupported_nvrx(installed) is None:
        try:
            from megatron_ckpt_ext.compat.nvrx import unmatched

            problem = unmatched() or ""
        except Exception as error:  # an optional package can fail to import in any way
            problem = f"nvidia-resiliency-ext cannot be imported ({type(error).__name__}: {error})"
    return Facts(async_save=async_save, nvrx=installed, problem=problem)


def probed_writer(
    start: Callable[[WorkerSettings, timedelta], Writer], settings: WorkerSettings, timeout: timedelta
) -> tuple[Writer | None, str]:
    """Start a writer process and let it do nothing once, before training. No collectives, never raises.

    Args:
        start: starts it.
        settings: of the process.
        timeout: how long it may take without moving a byte.

    Returns:
        The writer, for the queue; or why there is none.
    """
    try:
        writer = start(settings, timeout)
    except Exception as error:
        return None, start_problem(error)
    call = Call(index=_PROBE, function=write_nothing, arguments=[], options={}, preload=None)
    writer.submit(call)
    writer.wait()
    failure = writer.poll(_PROBE).failure
    writer.forget(_PROBE)
    if failure is None:
        return writer, ""
    writer.close()
    return None, f"the writer process does not work ({failure})"


def start_problem(error: Exception) -> str:
    """Say why there is no writer process."""
    return f"no writer process can be started ({type(error).__name__}: {error})"


def agree_on_mode(mode: Mode, wrapper: Any) -> Mode:
    """Make every rank's decision one. Called on all ranks: one MIN all_reduce; a broadcast if it is a fallback.

    Warns once, on the coordinator, if it is a fallback.

    Args:
        mode: of this rank.
        wrapper: torch's ``_DistWrapper`` of all ranks.
    """
    nobody = wrapper.get_world_size()
    falling = wrapper.rank if mode.is_fallback else nobody
    if wrapper.use_dist:
        asynchronous, falling = reduce_min([int(mode.asynchronous), falling], wrapper.group)
        if falling < nobody:
            mode = _of_rank(falling, mode, wrapper)
        elif bool(asynchronous) != mode.asynchronous:
            mode = Mode(asynchronous=False, reason="asynchronous saves were not asked for on all ranks")
    if mode.is_fallback and wrapper.is_coordinator:
        logger.warning(
            "Checkpoints are saved synchronously, though asynchronous saves were asked for: %s.", mode.reason
        )
    return mode


def _of_rank(rank: int, mode: Mode, wrapper: Any) -> Mode:
    import torch.distributed as dist

    reasons: list[str | None] = [mode.reason]
    source = rank if wrapper.group is None else dist.get_global_rank(wrapper.group, rank)
    dist.broadcast_object_list(reasons, src=source, group=wrapper.group)
    return _fallback(f"{reasons[0]}, on rank {rank}" if rank else str(reasons[0]))


def _fallback(reason: str) -> Mode:
    return Mode(asynchronous=False, reason=reason, is_fallback=True)
