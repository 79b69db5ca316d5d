"""The end of a queue and of its writer: bounded, in good order, and honest about a save that was not completed."""

from pathlib import Path
from typing import Any

from lives import SHORT

pytest_plugins = ["guarantee_jobs"]

type Lives = tuple[Path, dict[str, Any]]


def test_closing_while_a_writer_hangs_is_bounded_and_says_that_the_save_failed(lives: Lives) -> None:
    error, seconds, published, in_flight = lives[1]["closed while writing"]

    assert f"rank 0: writing failed: the writer process moved no byte for {SHORT.total_seconds():g} s" in error
    assert seconds < 4 * SHORT.total_seconds()
    assert (published, in_flight) == (False, 0)


def test_an_idle_writer_ends_by_itself(lives: Lives) -> None:
    """It is killed only if it does not."""
    assert not lives[1]["closed"]["writer left"]
    assert not lives[1]["closed"]["killed"]
