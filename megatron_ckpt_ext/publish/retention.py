"""Which steps a job keeps and why: pure policies and one pure decision, then the deletion of the others.

A step is counted only if it is complete and not newer than the one that was finalized last, so neither a step that was
cut off nor one that an earlier life of the job left ahead can push out the one to resume from.
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_ckpt_ext.compat.dcp import METADATA_FILE
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.publish.completeness import CheckpointReport, verify_checkpoint
from megatron_ckpt_ext.publish.remove import remove_step
from megatron_ckpt_ext.publish.steps import StepPaths

logger = logging.getLogger(__name__)

__all__ = [
    "Decision",
    "KeepAny",
    "KeepInterval",
    "KeepLast",
    "RetentionPolicy",
    "RetentionReport",
    "decide_retention",
    "retain",
]


class RetentionPolicy(Protocol):
    """Says which steps to keep. Pure."""

    def reasons(self, steps: Sequence[int]) -> Mapping[int, str]:
        """Return why each step is kept, for those that are.

        Whether a step is kept may depend on its number and on the newer steps that are kept, not on those that are not.

        Args:
            steps: complete steps, ascending.
        """


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keeps the newest steps.

    Raises:
        ConfigurationError: a count below 1.
    """

    count: int
    """How many."""

    def __post_init__(self) -> None:
        """Refuse to keep nothing."""
        _check_at_least_one("keep_last", self.count)

    def reasons(self, steps: Sequence[int]) -> Mapping[int, str]:
        """Name the last ``count``."""
        return dict.fromkeys(steps[-self.count :], f"one of the last {self.count}")


@dataclass(frozen=True, slots=True)
class KeepInterval:
    """Keeps the steps that a number divides.

    Raises:
        ConfigurationError: an interval below 1.
    """

    interval: int
    """That number."""

    def __post_init__(self) -> None:
        """Refuse what divides nothing."""
        _check_at_least_one("keep_interval", self.interval)

    def reasons(self, steps: Sequence[int]) -> Mapping[int, str]:
        """Name the multiples of ``interval``."""
        return {step: f"a multiple of {self.interval}" for step in steps if step % self.interval == 0}


@dataclass(frozen=True, slots=True)
class KeepAny:
    """Keeps what any of its policies keeps."""

    policies: tuple[RetentionPolicy, ...]
    """The policies; with none of them, nothing is kept."""

    def reasons(self, steps: Sequence[int]) -> Mapping[int, str]:
        """Join the reasons of all policies."""
        found = [policy.reasons(steps) for policy in self.policies]
        return {step: ", ".join(each[step] for each in found if step in each) for each in found for step in each}


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigurationError(f"{name} {value} would keep no step: give 1 or more, or leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What happens to one step."""

    step: int
    """The step."""
    keep: bool
    """Whether it stays."""
    reason: str
    """Why so."""


def decide_retention(
    policy: RetentionPolicy, *, complete: Collection[int], incomplete: Collection[int], finalized: int
) -> tuple[Decision, ...]:
    """Decide about every step. Pure; no collectives.

    The newest complete step stays whatever the policy says, and so does what is newer: another life of the job, or a
    save that goes on. An incomplete step behind it goes.

    Args:
        policy: asked about the complete steps up to ``finalized`` only.
        complete: steps that are complete.
        incomplete: the others.
        finalized: the step that was published, or resumed from, last.

    Returns:
        Decisions in ascending order of the steps.
    """
    counted = sorted(step for step in complete if step <= finalized)
    newest = counted[-1] if counted else None
    reasons = dict(policy.reasons(counted))
    if newest is not None:
        reasons.setdefault(newest, "the newest complete one")
    for step in {*complete, *incomplete} - {*counted}:
        if step > finalized:
            reasons[step] = "newer than the finalized one"
        elif newest is None or step > newest:
            reasons[step] = "incomplete, but no newer step is complete"
    going = {
        step: "incomplete" if step in incomplete else "not kept by any policy" for step in (*complete, *incomplete)
    }
    return tuple(
        Decision(step=step, keep=step in reasons, reason=reasons.get(step, going[step])) for step in sorted(going)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionReport:
    """What ``retain`` decided and did."""

    decisions: tuple[Decision, ...] = ()
    """About each step that was there, ascending; a step that no policy would keep was not judged."""
    removed: tuple[int, ...] = ()
    """Steps that are gone, ascending."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Steps that should be gone: step -> why they are not, one sentence. They are tried again the next time."""


def retain(
    directory: str | os.PathLike[str],
    policy: RetentionPolicy,
    *,
    finalized: int,
    subdirectory: str = "",
    abandoned: Collection[int] = (),
    judge: Callable[[str], CheckpointReport] = verify_checkpoint,
    remove: Callable[[StepPaths, int], None] = remove_step,
) -> RetentionReport:
    """Remove the steps in ``directory`` that the policy does not keep. No collectives: one rank calls it.

    Only ``step_N/SUBDIRECTORY`` is touched, and ``step_N`` where nothing else is in it. What fails is a warning and is
    told in the report; the other steps go on. An incomplete step that has ``.metadata`` is left alone, with a warning:
    it was finished once, and what cannot be read today may be readable tomorrow.

    Cost: one listing; one ``judge`` for each step that stays up to ``finalized``, and for each incomplete one found on
    the way to them. The steps that go are not judged. ``verify_checkpoint`` reads the whole ``.metadata``, so where an
    interval keeps many steps pass a ``RememberingJudge``, which reads each once.

    Args:
        directory: of the steps; may not exist yet.
        policy: what to keep.
        finalized: the step that was published, or resumed from, last; newer ones are not touched.
        subdirectory: of the checkpoint inside each ``step_N``.
        abandoned: steps of another life of the job, ahead of the one that this one resumed from: they stay, uncounted,
            and are not in the report.
        judge: ``verify_checkpoint``, or a ``RememberingJudge`` around it.
        remove: takes one step away, or raises ``OSError``.

    Raises:
        ConfigurationError: ``directory`` and ``subdirectory`` cannot name steps.
    """
    paths = StepPaths(os.fspath(directory), subdirectory)
    try:
        steps: Sequence[int] = paths.steps()
    except OSError as error:
        logger.warning("no checkpoint was removed: %r cannot be listed: %s", paths.directory, error.strerror)
        return RetentionReport()
    steps = [step for step in steps if step not in abandoned]
    decisions, faults = _decided(paths, steps, policy, finalized, judge)
    going = [decision.step for decision in decisions if not decision.keep]
    failed = {step: problem for step in going if (problem := _removed(paths, step, faults.get(step), remove))}
    for step, problem in failed.items():
        logger.warning("%s was not removed: %s", paths.path(step), problem)
    return RetentionReport(
        decisions=decisions, removed=tuple(step for step in going if step not in failed), failed=failed
    )


def _decided(
    paths: StepPaths,
    steps: Sequence[int],
    policy: RetentionPolicy,
    finalized: int,
    judge: Callable[[str], CheckpointReport],
) -> tuple[tuple[Decision, ...], dict[int, str]]:
    """Judge only what would stay, until it does: a step counts as complete until its turn comes.

    The result is the same as if all had been judged, since policies do not look at what they do not keep.

    Returns:
        The decisions; and why each incomplete step is so, as far as they were judged.
    """
    complete, faults = set[int](), dict[int, str]()
    while True:
        unjudged = set(steps) - complete - faults.keys()
        decisions = decide_retention(
            policy, complete=complete | unjudged, incomplete=faults.keys(), finalized=finalized
        )
        due = [each.step for each in decisions if each.keep and each.step in unjudged and each.step <= finalized]
        if not due:
            return decisions, faults
        for step in due:
            report = judge(paths.path(step))
            if report.complete:
                complete.add(step)
            else:
                faults[step] = report.reason


def _removed(paths: StepPaths, step: int, fault: str | None, remove: Callable[[StepPaths, int], None]) -> str | None:
    """Remove a step; return why that was not possible, or ``None``."""
    if fault is not None and os.path.lexists(os.path.join(paths.path(step), METADATA_FILE)):
        return f"it has {METADATA_FILE}, but is not complete: {fault}. Look at it, and remove it by hand"
    try:
        remove(paths, step)
    except OSError as error:
        return f"{error.strerror or error}: {error.filename or paths.path(step)!r}"
    return None
