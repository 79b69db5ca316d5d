"""Fixtures shared by the tests: the session's pool of rank processes.

Makes the checkout, this folder and functional_tests importable, in the ranks too: spawned processes take over
`sys.path`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
FOLDERS = (TESTS, TESTS.parent, TESTS.parent / "functional_tests", TESTS.parent / "functional_tests" / "slurm")
sys.path[:0] = [str(folder) for folder in FOLDERS if str(folder) not in sys.path]

from ranks import RankPool  # noqa: E402  (needs the path set above)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real gloo ranks, started when first used and ended with the session."""
    with RankPool() as pool:
        yield pool
