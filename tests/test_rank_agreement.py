"""What the ranks of a job do and raise is alike: with unequal delays, whoever fails, and whatever it raises."""

import pytest
from guarantee_scenarios import NO_ERROR
from scenes import Scenes

pytest_plugins = ["guarantee_jobs"]


def test_a_poll_costs_the_same_on_every_rank_whoever_is_done_first(scenes: Scenes) -> None:
    """And a rank that has written does not finalize while another has not."""
    polls = scenes.alike("unequal_delays")

    assert len(polls) == 2 * 3 * 2
    for all_written, finalized, collectives, in_flight in polls:
        assert collectives == {"all_reduce": 1}
        assert finalized + in_flight == 1
        assert all_written or finalized == 0
    assert sum(finalized for _, finalized, _, _ in polls) == 2


def test_hooks_run_behind_the_vote_of_all_ranks(scenes: Scenes) -> None:
    """On the coordinator in the poll that publishes, on the others once they know of it; once each."""
    assert scenes("hooks") == [[(1, True)], [(2, True)]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hook_that_fails_leaves_the_checkpoint_and_the_ranks_alike(scenes: Scenes, rank: int) -> None:
    (error, _), tracker, saved_after = scenes.alike(f"failing_hook_{rank}")

    assert error == NO_ERROR or f"rank {rank}: publishing failed: LookupError: no such thing" in error
    assert (tracker, saved_after) == ("1", 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_callback_that_fails_leaves_the_checkpoint_and_the_ranks_alike(scenes: Scenes, rank: int) -> None:
    (error, _), published, saved_after = scenes.alike(f"failing_callback_{rank}")

    assert error == NO_ERROR or f"rank {rank}: publishing failed: LookupError: no such thing" in error
    assert (published, saved_after) == (True, 1)


def test_a_poll_tells_of_a_failed_save_and_failures_in_a_row_are_counted(scenes: Scenes) -> None:
    found = scenes.alike("failures_in_a_row")

    assert [raised_by_poll for _, raised_by_poll, _ in found] == [True, True, False]
    assert all("rank 1: writing failed: LookupError: no such thing" in error for error, _, _ in found[:2])
    assert [failures for _, _, failures in found] == [1, 2, 0]


@pytest.mark.parametrize("layout", ["create", "reuse"])
@pytest.mark.parametrize("results", ["one_less", "none", "silent"])
def test_a_rank_that_reports_less_than_it_planned_fails_the_save_on_all(
    scenes: Scenes, results: str, layout: str
) -> None:
    error, published, saved_after = scenes.alike(f"{results}_{layout}")

    assert error.startswith("WriteFailedError: ")
    assert "rank 1" in error
    assert (published, saved_after) == (False, 1)


def test_memory_that_is_released_is_an_error_and_not_the_end_of_the_process(scenes: Scenes) -> None:
    error, saved_after = scenes.alike("released")

    assert "rank 1: planning failed: ValueError: the memory of optimizer.exp_avg is released" in error
    assert saved_after == 1


def test_torchs_own_exception_while_planning_becomes_a_vote(scenes: Scenes) -> None:
    """It is no ``Exception``, so it escapes ``except Exception``, and the peers would wait for this rank."""
    assert scenes.alike("torchs_exception_alone") == "voted"
