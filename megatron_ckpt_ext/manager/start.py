"""The start of a manager: what every rank finds, made one decision."""

import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.events import EventLog
from megatron_ckpt_ext.manager.config import ManagerConfig
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.publish.steps import StepPaths
from megatron_ckpt_ext.strategy.startup import Action, Finding, agree_on_start, examine

__all__ = ["Started", "start"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """What a manager works with."""

    log: EventLog
    """Its events; whoever takes it closes it."""
    finding: Finding
    """Whether it follows a prepared layout, and which."""
    fingerprint: Fingerprint
    """Of the job."""


def start(paths: StepPaths, config: ManagerConfig, group: dist.ProcessGroup | None, wrapper: Any) -> Started:
    """Make the directory, open the events and decide about prepared metadata.

    Called on all ranks: one MIN all_reduce; a broadcast before it refuses.

    Args:
        paths: of the steps.
        config: settings of this rank.
        group: all ranks of the job.
        wrapper: torch's ``_DistWrapper`` of that.

    Raises:
        ConfigurationError: on every rank, with the same sentence.
    """
    _check_ranks(config, group)
    fingerprint = Fingerprint(
        world_size=wrapper.get_world_size(),
        ckpt_format="fsdp_dtensor",
        workers_per_rank=config.files_per_rank,
        torch_version=str(torch.__version__),
    )
    with contextlib.ExitStack() as opened:
        log, finding = _examined(paths, config, fingerprint, wrapper)
        opened.callback(log.close)
        finding = agree_on_start(finding, config, group)
        opened.pop_all()
    if wrapper.is_coordinator:
        for warning in finding.warnings:
            logger.warning("%s.", warning)
    return Started(log=log, finding=finding, fingerprint=fingerprint)


def _check_ranks(config: ManagerConfig, group: dist.ProcessGroup | None) -> None:
    """Refuse a queue that would have no group, or a larger one."""
    if config.writer == "process" and not (
        dist.is_initialized() and dist.get_world_size(group) == dist.get_world_size()
    ):
        raise ConfigurationError(
            'writer "process" was given, but the manager does not have all ranks of a process group: call '
            "init_process_group before, pass no other group, or leave writer out"
        )


def _examined(
    paths: StepPaths, config: ManagerConfig, fingerprint: Fingerprint, wrapper: Any
) -> tuple[EventLog, Finding]:
    """Find out what this rank can do; what it cannot is a vote to stop, for the others wait in the reduction."""
    try:
        os.makedirs(paths.directory, exist_ok=True)
        log = EventLog(config.events, wrapper.rank)
    except (OSError, ConfigurationError) as error:
        return EventLog(None, wrapper.rank), Finding(action=Action.STOP, reason=str(error))
    create, world_size = config.ckpt_metadata_create, wrapper.get_world_size()
    return log, examine(config.ckpt_metadata, fingerprint, wrapper.rank, world_size, create=create)
