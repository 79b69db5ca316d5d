"""A queue disturbs nobody and is disturbed by nobody: its groups, its writer, the buffers it shares with that."""

from pathlib import Path
from typing import Any

from guarantee_scenarios import NO_ERROR
from scenes import Scenes
from workload import assert_holds

pytest_plugins = ["guarantee_jobs"]

type Lives = tuple[Path, dict[str, Any]]


def test_a_save_communicates_on_cpu_groups_of_our_own_only(scenes: Scenes) -> None:
    """Whether all ranks make its layout, it follows one, or it fails; the default group may be a GPU's."""
    default, own, saves = scenes.alike("groups_of_a_save")

    (queues,) = saves[1]
    assert [set(used) for used in saves] == [{own, queues}, {queues}, {own, queues}]
    assert {backend for used in saves for backend in used.values()} == {"gloo"}
    assert default not in {own, queues}


def test_planning_communicates_with_nobody(scenes: Scenes) -> None:
    assert scenes.alike("plan_of_a_save") == {}


def test_two_queues_have_two_groups(lives: Lives) -> None:
    first, second = lives[1]["groups"]

    assert first
    assert second
    assert not first & second


def test_a_queue_that_was_closed_saves_again(lives: Lives) -> None:
    """With a new writer, which knows nothing of the buffers that the old one shared with the trainer."""
    directory, found = lives
    errors, kept = found["saved again"]

    assert errors == [NO_ERROR, NO_ERROR]
    for name, values in kept.items():
        assert_holds(directory / name, [values])


def test_shared_buffers_are_not_filled_anew_before_the_writer_has_read_them(lives: Lives) -> None:
    directory, found = lives
    error, kept = found["overlapping alone"]

    assert error == NO_ERROR
    assert len(kept) == 3
    for name, values in kept.items():
        assert_holds(directory / name, [values])


def test_nor_after_another_queue_was_closed(lives: Lives) -> None:
    directory, found = lives
    error, kept = found["overlapping beside"]

    assert error == NO_ERROR
    assert len(kept) == 3
    for name, values in kept.items():
        assert_holds(directory / name, [values])
