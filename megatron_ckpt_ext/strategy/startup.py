"""Deciding at start-up, once and alike on all ranks, whether a job reuses, creates, or stops.

Each rank looks at its own copy of the file; one small reduction makes the findings one decision, so a file that is
damaged or missing for one rank stops all of them with the same sentence.
"""

import hashlib
import os
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import torch.distributed as dist

from megatron_ckpt_ext.commit.prepared_file import is_checkpoint_file
from megatron_ckpt_ext.commit.status import reduce_min
from megatron_ckpt_ext.errors import ConfigurationError, PreparedFileError
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.prepared import FingerprintMismatchError, PreparedMetadata

__all__ = ["Action", "Finding", "agree_on_start", "examine"]


class Action(IntEnum):
    """What a job does; the smallest of all ranks' findings decides."""

    STOP = 0
    """The job cannot do what was asked."""
    CREATE = 1
    """Make the prepared file in the first save."""
    REUSE = 2
    """Follow the prepared file from the first save on."""
    NOTHING = 3
    """No prepared metadata was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one rank found, and what it would do."""

    action: Action
    """The action."""
    reason: str
    """Why, one sentence for the operator."""
    prepared: PreparedMetadata | None = None
    """The rank's part, for ``REUSE``."""
    warnings: tuple[str, ...] = field(default=())
    """What else the operator should know."""


def examine(path: str | None, current: Fingerprint, rank: int, world_size: int, *, create: bool) -> Finding:
    """Look at the prepared file. No collectives, no side effects.

    Args:
        path: of ``--ckpt-metadata``.
        current: settings of this job.
        rank: this rank.
        world_size: number of ranks.
        create: whether ``--ckpt-metadata-create`` was given.
    """
    if path is None:
        return Finding(action=Action.NOTHING, reason="no --ckpt-metadata")
    if problem := _location_problem(path, create=create):
        return Finding(action=Action.STOP, reason=f"--ckpt-metadata {path}: {problem}")
    if not os.path.exists(path):
        return Finding(action=Action.CREATE, reason=f"{path} is not there yet, the first save makes it")
    try:
        prepared = PreparedMetadata.load(path, rank, world_size, expected=current)
    except FingerprintMismatchError as error:
        if create and error.ours:
            listed = "; ".join(str(difference) for difference in error.differences)
            reason = f"{path} does not fit this job ({listed}), the first save replaces it"
            return Finding(action=Action.CREATE, reason=reason, warnings=(reason,))
        return Finding(action=Action.STOP, reason=f"--ckpt-metadata: {error}")
    except PreparedFileError as error:
        return Finding(action=Action.STOP, reason=f"--ckpt-metadata: {error}")
    except Exception as error:  # must become a vote: the peers are on their way to the reduction
        return Finding(action=Action.STOP, reason=f"--ckpt-metadata {path}: {type(error).__name__}: {error}")
    return Finding(
        action=Action.REUSE,
        reason=f"saves reuse {path}",
        prepared=prepared,
        warnings=_warnings(path, prepared.fingerprint, current),
    )


def agree_on_start(finding: Finding, config: Any, group: dist.ProcessGroup | None = None) -> Finding:
    """Make every rank's finding one decision. Called on all ranks: one MIN all_reduce; a broadcast before it stops.

    A process without a process group is the only rank.

    Args:
        finding: of this rank.
        config: settings of this rank, a dataclass that all ranks must have alike; with ``ckpt_metadata`` and
            ``ckpt_metadata_create``.
        group: all ranks of the job; ``None`` is the default group.

    Returns:
        The finding, or in its place the decision to create where another rank needs that.

    Raises:
        ConfigurationError: on every rank, with the sentence of the lowest rank that must stop.
    """
    if not dist.is_initialized():
        if finding.action is Action.STOP:
            raise ConfigurationError(finding.reason)
        return finding
    settings, file = _digest(repr(config)), _digest(_identity(finding))
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    stopping = rank if finding.action is Action.STOP else world_size
    replaceable = int(finding.prepared is None or finding.prepared.in_our_format)
    vector = [int(finding.action), stopping, settings, -settings, file, -file, replaceable]
    action, stopping, low_settings, high_settings, low_file, high_file, replaceable = reduce_min(vector, group)
    if low_settings != -high_settings:
        raise ConfigurationError(_differing_settings(config, group))
    if action == Action.STOP:
        raise ConfigurationError(_sentence_of(stopping, finding.reason, group))
    several_files = action == Action.REUSE and low_file != -high_file
    if not several_files and action != Action.CREATE:
        return finding
    if not (config.ckpt_metadata_create and replaceable):
        raise ConfigurationError(
            f"--ckpt-metadata {config.ckpt_metadata}: not all ranks see the same file. Copy one file to every node, "
            "or name another FILE with --ckpt-metadata-create"
        )
    if finding.action is Action.CREATE:
        return finding
    reason = f"not all ranks see the same {config.ckpt_metadata}, the first save makes it anew"
    return Finding(action=Action.CREATE, reason=reason, warnings=(reason,))


def _location_problem(path: str, *, create: bool) -> str | None:
    parent = os.path.dirname(os.path.abspath(path))
    if os.path.exists(path) and not os.path.isfile(path):
        return "this is a directory or a device: name a file"
    if not create:
        return None if os.path.exists(path) else "no such file: name an existing one, or add --ckpt-metadata-create"
    if not os.path.isdir(parent):
        return f"its directory {parent} does not exist: make it first"
    if not os.access(parent, os.W_OK):
        return f"its directory {parent} is not writable: choose another place"
    if not os.path.exists(path) and is_checkpoint_file(path):
        return "a new file there would be taken for a part of a checkpoint: choose another directory and name"
    return None


def _warnings(path: str, prepared: Fingerprint, current: Fingerprint) -> tuple[str, ...]:
    warnings = []
    if versions := prepared.version_differences(current):
        listed = "; ".join(str(difference) for difference in versions)
        warnings.append(f"{path} was made with other versions: {listed}. Each save checks that the layout still fits")
    if unknown := prepared.unknown_structural_fields(current):
        listed = ", ".join(name.replace("_", " ") for name in unknown)
        warnings.append(f"{path} does not tell its {listed}; each save checks that the layout still fits")
    return tuple(warnings)


def _identity(finding: Finding) -> str:
    return finding.prepared.identity if finding.prepared is not None else ""


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def _differing_settings(config: Any, group: dist.ProcessGroup | None) -> str:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, config, group=group)
    for name in (each.name for each in fields(config)):
        values = [getattr(each, name) for each in everyone]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            flag = "--" + name.replace("_", "-")
            return (
                f"{flag} differs between ranks: {values[0]!r} on rank 0, {values[other]!r} on rank {other}. "
                "Start every rank with the same arguments"
            )
    return "the checkpoint settings differ between ranks: start every rank with the same arguments"


def _sentence_of(rank: int, own: str, group: dist.ProcessGroup | None) -> str:
    sentence: list[str | None] = [own]
    source = rank if group is None else dist.get_global_rank(group, rank)
    dist.broadcast_object_list(sentence, src=source, group=group)
    return str(sentence[0])
