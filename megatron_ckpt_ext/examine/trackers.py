"""Megatron's and Megatron-Bridge's trackers: do they name the newest complete step, and how to put them right."""

import os
import re
from dataclasses import dataclass

from megatron_ckpt_ext.publish.atomic import write_file
from megatron_ckpt_ext.publish.latest import LatestStep
from megatron_ckpt_ext.publish.storage.interface import storage_of

__all__ = ["ITERATION_TRACKER", "STATE_TRACKER", "TrackerFault", "find_tracker_faults", "fix_trackers"]

ITERATION_TRACKER = "latest_checkpointed_iteration.txt"
"""Holds the step as text; of Megatron-LM, and beside the other one in Megatron-Bridge."""
STATE_TRACKER = "latest_train_state.pt"
"""A copy of the step's own ``train_state.pt``; Megatron-Bridge resumes from it."""
_STEP_STATE = "train_state.pt"
_MEGATRON_STEP = re.compile(r"iter_\d{7,}")
_LIMIT = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerFault:
    """A tracker that leads a resumed job elsewhere than to the newest complete step."""

    path: str
    """The tracker."""
    problem: str
    """What is wrong, a sentence without the path."""
    right: bytes
    """What it should hold."""


def find_tracker_faults(directory: str, latest: LatestStep) -> tuple[TrackerFault, ...]:
    """Compare the trackers of a directory with its newest complete step. No collectives.

    Steps of a ``CheckpointManager`` have none. Where no step is complete there is nothing that a tracker should name.

    Args:
        directory: of the steps, or ``msc://profile/prefix``.
        latest: what ``latest_complete_step`` found there.

    Raises:
        OSError: a tracker that is there cannot be read.
    """
    if latest.path is None or not _MEGATRON_STEP.fullmatch(os.path.basename(latest.path)):
        return ()
    right = {ITERATION_TRACKER: str(latest.step).encode(), STATE_TRACKER: _read(os.path.join(latest.path, _STEP_STATE))}
    return tuple(
        TrackerFault(path=path, problem=problem, right=content)
        for name, content in right.items()
        if content is not None and (problem := _problem(path := os.path.join(directory, name), content, latest.step))
    )


def fix_trackers(faults: tuple[TrackerFault, ...]) -> None:
    """Rewrite trackers, each at once. No collectives; while no job writes there.

    Raises:
        OSError: one cannot be written; it is as it was.
    """
    for fault in faults:
        write_file(fault.path, [fault.right])


def _problem(path: str, right: bytes, step: int | None) -> str | None:
    found = _read(path)
    if found is None:
        return f"is missing, though step {step} is complete"
    if found == right or (path.endswith(ITERATION_TRACKER) and found.strip() == right):
        return None
    if path.endswith(STATE_TRACKER):
        return f"is not the state of step {step}, the newest complete one"
    text = found.decode(errors="replace").strip()
    return f"holds {text[:40]!r}, and the newest complete step is {step}"


def _read(path: str) -> bytes | None:
    storage = storage_of(path)
    if not storage.exists(path):
        return None
    with storage.open(path) as file:
        return file.read(_LIMIT)
