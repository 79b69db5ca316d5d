"""NVRx's in-process restart in the middle of two saves: nothing of the old run ends up in the new one."""

from pathlib import Path
from typing import Any

import pytest
from guarantee_scenarios import NO_ERROR
from lives import restart_on_rank
from ranks import RankPool
from workload import assert_holds


@pytest.fixture(scope="module")
def restarted(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("restarted")
    return directory, ranks.run(restart_on_rank, str(directory), timeout=90)


def test_a_completion_of_the_old_run_finalizes_nothing(restarted: tuple[Path, list[dict[str, Any]]]) -> None:
    """The first save of the new run has the number that the save which was written and not finalized had."""
    for found in restarted[1]:
        assert found["too early"] == ([], False)
        assert found["of the old"] == [False, False]
        assert found["the old queue"] == ([], 0)


def test_the_first_save_of_the_new_run_is_complete(restarted: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, by_rank = restarted

    assert [found["errors"] for found in by_rank] == [[NO_ERROR] * 4] * 2
    assert all(found["finalized"] for found in by_rank)
    assert_holds(directory / "retry", [found["kept"]["retry"] for found in by_rank])
