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
from scenes import Scenes


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
