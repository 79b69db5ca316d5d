"""The jobs behind the guarantees in ``docs/guarantees.md``, each run once a session, and a judge of what they saved.

A plug-in of pytest, for its fixtures; test modules import it before pytest does, so PYTEST_DONT_REWRITE its asserts.
"""

from pathlib import Path
from typing import Any

import pytest
from guarantee_scenarios import ONE_QUEUE
from lives import lives_on_rank
from queue_scenarios import LONG, play_on_rank
from ranks import RankPool
from workload import assert_holds


class Scenes:
    """What the scenarios of one queue found, on two ranks."""

    def __init__(self, directory: Path, by_rank: list[Any]) -> None:
        self._directory = directory
        self._by_rank = by_rank

    def __call__(self, name: str) -> list[Any]:
        """Of each rank, after every checkpoint of the scenario was found to hold what was saved."""
        found = [rank[name][0] for rank in self._by_rank]
        for each in found:
            assert not (isinstance(each, str) and each.startswith("Traceback")), each
        for saved in self._by_rank[0][name][1]:
            assert_holds(self._directory / name / saved, [rank[name][1][saved] for rank in self._by_rank])
        return found

    def alike(self, name: str) -> Any:
        """What both ranks found."""
        first, second = self(name)
        assert first == second, (first, second)
        return first


@pytest.fixture(scope="session")
def scenes(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenarios over one queue, one after the other: a writer process costs seconds of imports."""
    directory = tmp_path_factory.mktemp("scenes")
    return Scenes(directory, ranks.run(play_on_rank, str(directory), ONE_QUEUE, LONG, timeout=90))


@pytest.fixture(scope="session")
def lives(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where it saved and what it found: one process with a queue that is closed and goes on, and one beside it."""
    directory = tmp_path_factory.mktemp("lives")
    (found,) = ranks.run(lives_on_rank, str(directory), world_size=1, timeout=90)
    return directory, found
