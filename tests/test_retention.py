"""Which steps stay and why, and what happens to the others."""

import logging
import os
import shutil
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import state_dict_saver

from megatron_ckpt_ext import latest_complete_step
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.publish.completeness import CheckpointReport, verify_checkpoint
from megatron_ckpt_ext.publish.judge import RememberingJudge
from megatron_ckpt_ext.publish.remove import remove_step
from megatron_ckpt_ext.publish.retention import (
    KeepAny,
    KeepInterval,
    KeepLast,
    RetentionPolicy,
    decide_retention,
    retain,
)
from megatron_ckpt_ext.publish.steps import StepPaths

pytest_plugins = ["made_checkpoints"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

LAST_AND_INTERVAL = KeepAny((KeepLast(2), KeepInterval(100)))
NEWER, ALONE = "newer than the finalized one", "the newest complete one"
CUT_OFF = "incomplete, but no newer step is complete"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (KeepLast(1), {250: "one of the last 1"}),
        (KeepLast(3), dict.fromkeys([200, 240, 250], "one of the last 3")),
        (KeepLast(9), dict.fromkeys([0, 100, 150, 200, 240, 250], "one of the last 9")),
        (KeepInterval(100), dict.fromkeys([0, 100, 200], "a multiple of 100")),
        (KeepInterval(7), {0: "a multiple of 7"}),
        (KeepAny(()), {}),
        (
            LAST_AND_INTERVAL,
            {
                **dict.fromkeys([0, 100, 200], "a multiple of 100"),
                **dict.fromkeys([240, 250], "one of the last 2"),
            },
        ),
        (
            KeepAny((KeepLast(1), KeepInterval(50))),
            {**dict.fromkeys([0, 100, 150, 200], "a multiple of 50"), 250: "one of the last 1, a multiple of 50"},
        ),
    ],
)
def test_what_a_policy_keeps(policy: RetentionPolicy, expected: dict[int, str]) -> None:
    assert policy.reasons([0, 100, 150, 200, 240, 250]) == expected
    assert policy.reasons([]) == {}


@pytest.mark.parametrize("count", [0, -1])
def test_a_policy_that_would_keep_nothing_is_refused(count: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"^keep_last {count} would keep no step: give 1 or more"):
        KeepLast(count)
    with pytest.raises(ConfigurationError, match=rf"^keep_interval {count} would keep no step: give 1 or more"):
        KeepInterval(count)


GONE, INCOMPLETE = "not kept by any policy", "incomplete"


@pytest.mark.parametrize(
    ("policy", "complete", "incomplete", "finalized", "kept", "removed"),
    [
        pytest.param(KeepLast(1), [], [], 5, {}, {}, id="nothing"),
        pytest.param(KeepLast(1), [3, 4, 5], [], 5, {5: "one of the last 1"}, {3: GONE, 4: GONE}, id="last"),
        pytest.param(
            KeepLast(1), [10, 20, 300], [], 20, {20: "one of the last 1", 300: NEWER}, {10: GONE}, id="abandoned"
        ),
        pytest.param(
            KeepLast(1), [10, 20], [30, 40], 20, {20: "one of the last 1", 30: NEWER, 40: NEWER}, {10: GONE}, id="ahead"
        ),
        pytest.param(
            KeepLast(1), [10, 20], [30], 30, {20: "one of the last 1", 30: CUT_OFF}, {10: GONE}, id="cut_off_counts_not"
        ),
        pytest.param(
            KeepLast(2),
            [10, 20, 40],
            [5, 30],
            40,
            dict.fromkeys([20, 40], "one of the last 2"),
            {5: INCOMPLETE, 10: GONE, 30: INCOMPLETE},
            id="cut_off_between",
        ),
        pytest.param(KeepLast(1), [30], [10, 20], 20, {10: CUT_OFF, 20: CUT_OFF, 30: NEWER}, {}, id="none_counts"),
        pytest.param(KeepLast(1), [7, 9], [], 6, {7: NEWER, 9: NEWER}, {}, id="all_newer"),
        pytest.param(KeepInterval(100), [50, 150], [], 150, {150: ALONE}, {50: GONE}, id="newest_is_untouchable"),
        pytest.param(KeepAny(()), [1, 2], [], 2, {2: ALONE}, {1: GONE}, id="no_policy"),
        pytest.param(
            LAST_AND_INTERVAL,
            [100, 110, 120, 130],
            [200],
            130,
            {100: "a multiple of 100", **dict.fromkeys([120, 130], "one of the last 2"), 200: NEWER},
            {110: GONE},
            id="union",
        ),
    ],
)
def test_what_stays_and_why(
    policy: RetentionPolicy,
    complete: list[int],
    incomplete: list[int],
    finalized: int,
    kept: dict[int, str],
    removed: dict[int, str],
) -> None:
    decisions = decide_retention(policy, complete=complete, incomplete=incomplete, finalized=finalized)

    assert {each.step: each.reason for each in decisions if each.keep} == kept
    assert {each.step: each.reason for each in decisions if not each.keep} == removed
    assert [each.step for each in decisions] == sorted([*complete, *incomplete])


class OddPolicy:
    """Keeps the odd ones, to stand for a policy of somebody else."""

    def reasons(self, steps: Collection[int]) -> dict[int, str]:
        return {step: "odd" for step in steps if step % 2}


steps = st.sets(st.integers(0, 40), max_size=15)
simple = st.one_of(
    st.builds(KeepLast, st.integers(1, 5)), st.builds(KeepInterval, st.integers(1, 15)), st.just(OddPolicy())
)
policies = simple | st.builds(KeepAny, st.lists(simple, max_size=3).map(tuple))


@given(policies, steps, steps, st.integers(-1, 41))
def test_whatever_is_there_the_one_to_resume_from_stays(
    policy: RetentionPolicy, complete: set[int], others: set[int], finalized: int
) -> None:
    incomplete = others - complete

    decisions = decide_retention(policy, complete=complete, incomplete=incomplete, finalized=finalized)

    removed = {each.step for each in decisions if not each.keep}
    counted = {step for step in complete if step <= finalized}
    newest = max(counted, default=-1)
    assert newest not in removed
    assert all(step < newest for step in removed)
    assert removed.isdisjoint(policy.reasons(sorted(counted)))
    assert removed >= {step for step in incomplete if step < newest}
    assert len(decisions) == len(complete | incomplete)
    assert all(each.reason for each in decisions)


def report(path: str, reason: str = "") -> CheckpointReport:
    return CheckpointReport(
        path=path,
        kind="dcp",
        problems=(reason,) if reason else (),
        problem_count=bool(reason),
        items=0,
        bytes=0,
        files=0,
    )


@given(policies, steps, steps, st.integers(-1, 41))
def test_judging_what_stays_only_decides_as_judging_all(
    tmp_path_factory: pytest.TempPathFactory,
    policy: RetentionPolicy,
    complete: set[int],
    others: set[int],
    finalized: int,
) -> None:
    """And judges nothing twice, nothing newer, and nothing that goes unless it was found incomplete."""
    directory = tmp_path_factory.getbasetemp() / "judged"
    shutil.rmtree(directory, ignore_errors=True)
    paths, incomplete = StepPaths(str(directory)), others - complete
    for step in complete | incomplete:
        os.makedirs(paths.path(step))
    whole = {paths.path(step): step for step in complete}
    asked = Counter[str]()

    def judge(path: str) -> CheckpointReport:
        asked[path] += 1
        return report(path, "" if path in whole else "cut off")

    found = retain(directory, policy, finalized=finalized, judge=judge)

    expected = decide_retention(policy, complete=complete, incomplete=incomplete, finalized=finalized)
    assert [(each.step, each.keep) for each in found.decisions] == [(each.step, each.keep) for each in expected]
    kept = {each.step for each in expected if each.keep}
    assert set(paths.steps()) == kept
    assert set(asked.values()) <= {1}
    assert {whole[path] for path in asked if path in whole} == {step for step in complete & kept if step <= finalized}


def save(run: Path, step: int, subdirectory: str = "") -> Path:
    """Save a checkpoint of plain torch."""
    directory = Path(StepPaths(str(run), subdirectory).path(step))
    state_dict_saver.save({"weight": torch.full((3, 4), float(step))}, checkpoint_id=directory, no_dist=True)
    return directory


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_real_checkpoints_a_step_cut_off_and_an_abandoned_one(
    tmp_path: Path, made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keep one: neither what a crash cut off nor what an earlier life left ahead pushes out the one to resume from."""
    for name in ("step_1", "step_2"):
        shutil.copytree(made / name, tmp_path / name)  # of two ranks, in Megatron's format
    for step in (3, 5, 900):
        save(tmp_path, step)
    for step in (2, 5):
        (tmp_path / f"step_{step}" / ".metadata").unlink()

    found = retain(tmp_path, KeepLast(1), finalized=5)

    assert (found.removed, found.failed) == ((1, 2), {})
    assert {each.step: each.reason for each in found.decisions if each.keep} == {
        3: "one of the last 1",
        5: CUT_OFF,
        900: NEWER,
    }
    assert names(tmp_path) == {"step_3", "step_5", "step_900"}
    assert verify_checkpoint(tmp_path / "step_3").complete
    assert warnings_of(caplog) == []


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for step in (1, 2, 3, 9):
        save(run, step)
    save(other, 1)
    (run / "step_9").rename(run / "step_09")
    (run / "step_0").symlink_to(other / "step_1")
    (run / "iter_0000001").mkdir()
    (run / "step_1.tmp").mkdir()
    (run / "latest_checkpointed_iteration.txt").write_text("3")

    found = retain(str(run), KeepLast(1), finalized=3)

    assert found.removed == (1, 2)
    assert names(run) == {
        *("step_3", "step_09", "step_0", "iter_0000001", "step_1.tmp"),
        "latest_checkpointed_iteration.txt",
    }
    assert verify_checkpoint(other / "step_1").complete


def test_links_inside_a_step_go_and_lead_nowhere(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    outside = save(tmp_path / "outside", 7)
    (tmp_path / "step_1" / "link").symlink_to(outside)
    (tmp_path / "step_1" / ".complete").symlink_to(outside / ".metadata")
    (tmp_path / "step_1" / "more").mkdir()
    (tmp_path / "step_1" / "more" / "notes.txt").write_text("a step directory is ours as a whole")

    found = retain(tmp_path, KeepLast(1), finalized=2)

    assert (found.removed, found.failed) == ((1,), {})
    assert verify_checkpoint(outside).complete
    assert names(tmp_path) == {"step_2", "outside"}


@pytest.mark.parametrize("linked", ["step_1", "step_1/trainer"])
def test_a_link_in_place_of_a_step_is_an_error(tmp_path: Path, linked: str) -> None:
    """It may have come after the step was listed."""
    outside = save(tmp_path / "outside", 1, "trainer")
    link = tmp_path / "run" / linked
    link.parent.mkdir(parents=True)
    link.symlink_to(outside.parent if link.name == "step_1" else outside)

    with pytest.raises(NotADirectoryError, match="A link is not followed"):
        remove_step(StepPaths(str(tmp_path / "run"), "trainer"), 1)

    assert link.is_symlink()
    assert verify_checkpoint(outside).complete


def test_with_a_subdirectory_only_that_is_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, "trainer")
    save(tmp_path, 2, "loader")

    found = retain(tmp_path, KeepLast(1), finalized=3, subdirectory="trainer")

    assert found.removed == (1, 2)
    assert names(tmp_path) == {"step_2", "step_3"}
    assert names(tmp_path / "step_2") == {"loader"}


def test_a_deletion_that_fails_is_a_warning_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)

    def failing(paths: StepPaths, step: int) -> None:
        if step == 1:
            raise PermissionError(13, "Permission denied", "a file")
        remove_step(paths, step)

    found = retain(tmp_path, KeepLast(1), finalized=3, remove=failing)

    assert (found.removed, found.failed) == ((2,), {1: "Permission denied: 'a file'"})
    assert warnings_of(caplog) == [f"{tmp_path}/step_1 was not removed: Permission denied: 'a file'"]
    assert retain(tmp_path, KeepLast(1), finalized=3).removed == (1,)


def test_a_deletion_cut_off_leaves_a_step_that_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)

    def killed(path: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", killed)
        retain(tmp_path, KeepLast(2), finalized=3)
    shutil.rmtree(tmp_path / "step_3")
    shutil.rmtree(tmp_path / "step_2")

    assert names(tmp_path / "step_1") == {"__0_0.distcp"}
    assert latest_complete_step(tmp_path, subdirectory="").step is None
    save(tmp_path, 4)
    assert latest_complete_step(tmp_path, subdirectory="").step == 4
    assert retain(tmp_path, KeepLast(2), finalized=4).removed == (1,)
    assert names(tmp_path) == {"step_4"}


def test_a_step_that_was_finished_once_is_not_removed_as_incomplete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files may be there again tomorrow: on Lustre an unreachable server looks like this."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step_2" / "__0_0.distcp").rename(tmp_path / "away")

    found = retain(tmp_path, KeepLast(2), finalized=3)

    assert (found.removed, list(found.failed)) == ((), [2])
    assert found.failed[2].startswith("it has .metadata, but is not complete: file '__0_0.distcp'")
    assert warnings_of(caplog) == [f"{tmp_path}/step_2 was not removed: {found.failed[2]}"]
    (tmp_path / "away").rename(tmp_path / "step_2" / "__0_0.distcp")
    assert retain(tmp_path, KeepLast(2), finalized=3).removed == (1,)


def test_a_directory_that_is_missing_or_cannot_be_listed_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")

    assert retain(tmp_path / "not there", KeepLast(1), finalized=3).decisions == ()
    assert warnings_of(caplog) == []
    assert retain(tmp_path / "file", KeepLast(1), finalized=3).decisions == ()
    assert "cannot be listed: Not a directory" in caplog.text


def test_a_judge_that_remembers_reads_each_metadata_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def judge(path: str) -> CheckpointReport:
        asked.append(os.path.basename(path))
        return verify_checkpoint(path)

    remembering = RememberingJudge(judge)
    for step in (100, 200, 201, 202):
        save(tmp_path, step)
        retain(tmp_path, LAST_AND_INTERVAL, finalized=step, judge=remembering)

    assert asked == ["step_100", "step_200", "step_201", "step_202"]
    shutil.rmtree(tmp_path / "step_202")
    save(tmp_path, 202)
    assert remembering(str(tmp_path / "step_202")).complete
    assert asked[4:] == ["step_202"]
    (tmp_path / "step_202" / ".metadata").unlink()
    assert not remembering(str(tmp_path / "step_202")).complete


def test_a_judge_that_remembers_judges_what_is_incomplete_anew(tmp_path: Path) -> None:
    directory, judge = save(tmp_path, 1), RememberingJudge()
    (directory / "__0_0.distcp").rename(tmp_path / "away")
    assert not judge(str(directory)).complete

    (tmp_path / "away").rename(directory / "__0_0.distcp")

    assert judge(str(directory)).complete
