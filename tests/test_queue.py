"""``AsyncSaveQueue`` on real ranks with real writer processes: votes, order, snapshots, failures, and its end.

What happens is in ``queue_scenarios``; each test judges one scenario.
"""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from queue_scenarios import INTACT, LONG, LOST, play_on_rank
from ranks import RankPool
from scenes import Scenes
from workload import Job, checkpoint_values

from megatron_ckpt_ext.commit.commit import How
from megatron_ckpt_ext.commit.queue import AsyncSaveQueue
from megatron_ckpt_ext.write.worker import WorkerSettings


@pytest.fixture(scope="module")
def intact(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenes]:
    directory = tmp_path_factory.mktemp("intact")
    yield Scenes(directory, ranks.run(play_on_rank, str(directory), INTACT, LONG, timeout=90))


@pytest.fixture(scope="module")
def lost(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenes]:
    directory = tmp_path_factory.mktemp("lost")
    yield Scenes(directory, ranks.run(play_on_rank, str(directory), LOST, timedelta(seconds=6), timeout=90))


def test_a_blocking_wait_finalizes(intact: Scenes) -> None:
    assert intact.alike("blocking") == (True, 0)


def test_a_poll_is_one_reduction(intact: Scenes) -> None:
    schedule, polls = intact.alike("polled")

    assert schedule == {}
    vote = {"all_reduce": 1}
    assert polls == [
        ("pending", [], vote, False),
        ("pending", [], vote, False),
        ("ready", [], vote, True),
        ("confirmed", [0], vote, True),
        ("idle", [], {}, True),
    ]


def test_a_blocking_wait_adds_one_confirming_reduction_a_save(intact: Scenes) -> None:
    assert intact.alike("waited") == {"all_reduce": 4}


def test_foreign_requests_are_written_and_finalized_in_order(intact: Scenes) -> None:
    finished, order, files = intact.alike("foreign")

    assert finished == 3
    assert order == ["nvrx", "later", "megatron", "later", "nothing"]
    assert files == ["alone", "megatron_0", "megatron_1", "nvrx_0", "nvrx_1"]


def test_a_foreign_request_that_fails_on_one_rank_raises_on_all(intact: Scenes) -> None:
    (writing, finalizing, ran_0), other = intact("foreign_failures")

    assert "rank 1: writing failed: LookupError: no such thing" in writing
    assert "rank 0: publishing failed: LookupError: no such thing" in finalizing
    assert ran_0 == []
    assert other == (writing, finalizing, ["right"])


def test_a_rank_with_nothing_to_write_takes_part(intact: Scenes) -> None:
    assert intact.alike("nothing_to_write") == "done"


def test_saves_in_flight_keep_their_own_values(intact: Scenes) -> None:
    """And the second is staged while the first is not written."""
    assert intact.alike("overlapping") == (True, 2, 2)


@pytest.mark.parametrize("how", ["plain", "cached", "shm", "shm_cached"])
def test_tensors_may_be_overwritten_once_schedule_returns(intact: Scenes, how: str) -> None:
    assert intact.alike(f"snapshot_{how}") == "done"


def test_finalizers_that_were_moved_to_the_request_of_the_logits(intact: Scenes) -> None:
    assert intact.alike("logits") == (2, "shard")


def test_a_rename_that_fails_raises_on_every_rank_in_the_next_poll(intact: Scenes) -> None:
    voted, confirmed, saved_after = intact.alike("late_failure")

    assert voted == "no failure"
    assert confirmed.startswith("PublishFailedError: ")
    assert "rank 0: publishing failed: " in confirmed
    assert saved_after == 1


def test_a_finalizer_that_fails_raises_on_every_rank(intact: Scenes) -> None:
    (failure, _), other = intact("failed_tracker")

    assert "rank 0: publishing failed: LookupError: no such thing" in failure
    assert other == (failure, [])


def test_a_logger_that_fails_costs_nothing(intact: Scenes) -> None:
    assert intact.alike("failed_logger") == (1, ["behind it"])


def test_a_finalizer_that_fails_after_the_confirmation_costs_nothing(intact: Scenes) -> None:
    assert intact.alike("failed_late") == 1


def test_a_finalizer_that_fails_where_all_ranks_are_needed_raises_on_every_rank(intact: Scenes) -> None:
    failure, failed, saved_after, failed_after = intact.alike("failed_integrity")

    assert failure.startswith("PublishFailedError")
    assert "rank 1: publishing failed: LookupError: no such thing" in failure
    assert (failed, saved_after, failed_after) == (1, 1, 0)


def test_rank_0_that_fails_where_others_wait_for_it_leaves_nobody_behind(intact: Scenes) -> None:
    (with_commit, without), total = intact.alike("failed_in_a_barrier")

    assert "rank 0: publishing failed: LookupError: no such thing" in with_commit
    assert "rank 0: publishing failed: LookupError: no such thing" in without
    assert total == 2


def test_saves_that_overlap_in_one_directory_both_fail(intact: Scenes) -> None:
    (first, second), published, saved_after = intact.alike("same_directory")

    assert "a later save was planned into the same directory" in first
    assert "twice is in flight: wait for it, or save elsewhere" in second
    assert not published
    assert saved_after == 1


def test_what_is_staged_for_a_save_that_has_failed_is_removed(intact: Scenes) -> None:
    failure, left = intact.alike("late_staging")

    assert "rank 1: writing failed: LookupError" in failure
    assert left == []


def test_a_prepared_file_that_is_gone_costs_one_save_where_drift_is_to_fail(intact: Scenes) -> None:
    published, (first, second) = intact.alike("follow_removed_strictly")

    assert first.startswith("WriteFailedError")
    assert "own.prepared cannot be read any more" in first
    assert (published, second) == ([How.TOGETHER], "no failure")


def test_the_training_thread_only_renames(intact: Scenes) -> None:
    for before, opened in intact("staged"):
        assert before == ["distcp", "distcp", "tmp", "tmp"]
        assert opened == []


@pytest.mark.parametrize("how", ["removed", "garbled"])
def test_a_prepared_file_that_changes_under_the_job_is_made_anew(intact: Scenes, how: str) -> None:
    (published, warnings, rewritten), (also_published, _, also_rewritten) = intact(f"follow_{how}")

    assert published == also_published == [How.REBUILT, How.REUSED]
    assert [warning for warning in warnings if "own.prepared" in warning and "rank 0: the layout in" in warning]
    assert rewritten and also_rewritten


def test_a_hostile_layout_is_not_run_and_made_anew(intact: Scenes) -> None:
    (published, warnings, executed), _ = intact("follow_hostile")

    assert published == [How.REBUILT]
    assert "posix.system, which no checkpoint metadata needs" in warnings[0]
    assert not executed


def test_a_request_that_cannot_be_pickled_fails_on_every_rank(intact: Scenes) -> None:
    failure, saved_after = intact.alike("unpicklable")

    assert "rank 1: staging failed: the save cannot be sent to the writer: " in failure
    assert saved_after == 1


def test_a_writer_whose_save_failed_goes_on(intact: Scenes) -> None:
    failure, saved_after, same_writer = intact.alike("failing_writer")

    assert "rank 1: writing failed: LookupError: no such thing" in failure
    assert saved_after == 1
    assert same_writer


def test_close_finalizes_what_it_can_and_can_be_called_again(intact: Scenes) -> None:
    failure, again, gone, in_flight, saved_after = intact.alike("closed")

    assert "rank 0: writing failed: LookupError: no such thing" in failure
    assert again == "no failure"
    assert gone
    assert (in_flight, saved_after) == (1, 1)


def test_ranks_that_vote_on_different_saves_all_hear_it(intact: Scenes) -> None:
    error = intact.alike("out_of_step")

    assert error.startswith("ranks vote on different checkpoint saves, numbers ")
    assert error.endswith("every rank must schedule the same saves and finalize them in the same order")


def test_a_writer_that_moves_no_byte_is_given_up_together(lost: Scenes) -> None:
    (failure, seconds, saved_after, _), (other_failure, _, _, replaced) = lost("hanging")

    assert failure == other_failure
    assert "rank 1: writing failed: the writer process moved no byte for 6 s" in failure
    assert 6 <= seconds < 20
    assert saved_after == 1
    assert replaced


def test_a_writer_lost_between_saves_is_replaced(lost: Scenes) -> None:
    assert lost.alike("killed_while_idle") == 1


def test_close_is_bounded_for_a_stopped_writer(lost: Scenes) -> None:
    for seconds, still_there in lost("closed_while_stopped"):
        assert seconds < 15
        assert not still_there


def storm_on_rank(directory: str, saves: int) -> tuple[int, float, list[int]]:
    """Back-to-back saves with random delays while the main thread reduces on the default group."""
    settings = WorkerSettings(rank=dist.get_rank(), cpu_priority=0)
    queue = AsyncSaveQueue(lambda: settings, timeout=LONG)
    strategy = Job(directory="", create=f"{directory}/prepared.metadata").strategy()
    delays = torch.Generator().manual_seed(dist.get_rank())
    finalized: list[int] = []
    total = torch.zeros(1)
    for step in range(saves):
        path = Path(directory, f"step_{step}")
        path.mkdir(exist_ok=True)
        held = {"w": ShardedTensor.from_rank_offsets("w", total.clone(), (0, dist.get_rank(), dist.get_world_size()))}
        queue.schedule_async_request(strategy.async_save(held, path))
        time.sleep(0.02 * float(torch.rand(1, generator=delays)))
        reduced = torch.ones(1)
        dist.all_reduce(reduced)
        total += reduced
        finalized += queue.maybe_finalize_async_calls()
    queue.close()
    return len(finalized), float(total), finalized


def test_a_hundred_saves_back_to_back(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(storm_on_rank, str(tmp_path), 100, timeout=90)

    assert first == second
    assert first[1] == 200.0
    assert first[2] == list(range(first[0]))
    for step in range(100):
        found = checkpoint_values(str(tmp_path / f"step_{step}"))
        assert [found[f"w@[{rank}]"].item() for rank in (0, 1)] == [2.0 * step] * 2
