"""Fixtures shared by the tests: the session's pool of rank processes.

Makes the checkout and this folder importable, in the ranks too: spawned processes take over `sys.path`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(TESTS), str(TESTS.parent)) if path not in sys.path]

from ranks import RankPool  # noqa: E402  (needs the path set above)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real gloo ranks, started when first used and ended with the session."""
    with RankPool() as pool:
        yield pool
