"""The rank pool itself: what its calls promise to every other test."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, RankPool, RanksFailed
from torch.distributed.checkpoint.api import CheckpointException


def _facts(label: str, *, suffix: str) -> tuple[str, int, str | None, int]:
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return label + suffix, int(total), os.environ.get("LOCAL_RANK"), os.getpid()


def _pid() -> int:
    return os.getpid()


def _raise_everywhere() -> int:
    raise CheckpointException("write", {})


def _raise_on_one() -> int:
    if dist.get_rank() == 1:
        raise ValueError("rank one refuses")
    return 7


def _hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def _die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _leave_environment() -> dict[str, str]:
    os.environ["LEFT_BEHIND"] = "1"
    return {"threads": os.environ["OMP_NUM_THREADS"], "world": os.environ["WORLD_SIZE"]}


def _see_environment() -> bool:
    return "LEFT_BEHIND" in os.environ


def _return_unpicklable() -> object:
    return lambda: None


def _start_sleeper() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def _alive(pid: int) -> bool:
    """Whether `pid` runs; a killed process that its new parent has not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_come_in_rank_order_from_a_fresh_group_and_ranks_are_kept(ranks: RankPool) -> None:
    first = ranks.run(_facts, "a", suffix="b")
    second = ranks.run(_facts, "a", suffix="b")
    assert [result[:3] for result in first] == [("ab", 3, "0"), ("ab", 3, "1")]
    assert first == second
    assert os.getpid() not in {result[3] for result in first}


def test_world_sizes_share_the_same_processes(ranks: RankPool) -> None:
    two = ranks.run(_pid, world_size=2)
    assert ranks.run(_pid, world_size=1) == two[:1]
    with pytest.raises(ValueError, match="1 to 4"):
        ranks.run(_pid, world_size=5)


def test_a_base_exception_of_every_rank_arrives_as_data(ranks: RankPool) -> None:
    errors = ranks.run_expecting_failure(_raise_everywhere)
    for rank, error in enumerate(errors):
        assert isinstance(error, RankError)
        assert error.rank == rank
        assert error.type_name == "torch.distributed.checkpoint.api.CheckpointException"
        assert "_raise_everywhere" in error.traceback


def test_the_results_of_the_other_ranks_stay_beside_an_error(ranks: RankPool) -> None:
    outcomes = ranks.run_expecting_failure(_raise_on_one)
    assert outcomes[0] == 7
    assert isinstance(outcomes[1], RankError)
    assert (outcomes[1].type_name, outcomes[1].message) == ("builtins.ValueError", "rank one refuses")
    with pytest.raises(RanksFailed, match="rank one refuses") as caught:
        ranks.run(_raise_on_one)
    assert list(caught.value.errors) == [1]
    assert len(ranks.run(_pid)) == 2, "a failed call leaves the pool usable"


def test_expecting_failure_refuses_success(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="no rank raised"):
        ranks.run_expecting_failure(_pid)


def test_a_call_leaves_no_environment_behind(ranks: RankPool) -> None:
    assert ranks.run(_leave_environment, world_size=1) == [{"threads": "1", "world": "1"}]
    assert ranks.run(_see_environment, world_size=1) == [False]


def test_a_result_that_cannot_travel_is_an_error_of_its_rank(ranks: RankPool) -> None:
    (error,) = ranks.run_expecting_failure(_return_unpicklable, world_size=1)
    assert isinstance(error, RankError)
    assert "pickle" in error.message


def test_a_hung_rank_is_named_with_its_stack_and_replaced(ranks: RankPool) -> None:
    before = ranks.run(_pid)
    with pytest.raises(RanksFailed) as caught:
        ranks.run(_hang_on_one, timeout=2.0)
    error = caught.value.errors[1]
    assert error.type_name == "ranks.RankHung"
    assert "_hang_on_one" in error.traceback
    assert "Timeout" in caught.value.errors[0].message.replace("Timed out", "Timeout"), "the peer's own error is there"
    assert not set(before) & set(ranks.run(_pid))


def test_a_dead_rank_is_named_and_replaced(ranks: RankPool) -> None:
    before = ranks.run(_pid)
    with pytest.raises(RanksFailed) as caught:
        ranks.run(_die_on_one, timeout=30.0)
    assert caught.value.errors[1].type_name == "ranks.RankDied"
    assert "-9" in caught.value.errors[1].message
    assert not set(before) & set(ranks.run(_pid))


def test_closing_ends_the_ranks_and_what_they_started() -> None:
    with RankPool() as pool:
        (child,) = pool.run(_start_sleeper, world_size=1)
        pids = [child, *pool.pids]
    pool.close()
    deadline = time.monotonic() + 5
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"of {pids}, some are left"
        time.sleep(0.05)
