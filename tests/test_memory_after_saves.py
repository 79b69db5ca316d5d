"""What is left of a save in memory: nothing of the trainer's tensors, in the writer, or in shared memory."""

from pathlib import Path
from typing import Any

import pytest
from scenes import Scenes

pytest_plugins = ["guarantee_jobs"]

STATE = 32 << 20
"""Bytes that a rank saves."""
LITTLE = 8 << 20
TENSORS = 4
"""In the state dict of ``workload``, on each rank."""


@pytest.mark.parametrize("how", ["plain", "cached", "shm", "shm_cached"])
def test_nothing_refers_to_the_saved_tensors_once_the_save_has_ended(scenes: Scenes, how: str) -> None:
    """Whether it went well or not: the optimizer may be offloaded, and its memory is free."""
    assert scenes.alike(f"references_{how}") == [(TENSORS, 0)] * 3


def test_the_writer_and_shared_memory_are_as_before_between_saves(scenes: Scenes) -> None:
    for saves in scenes("memory"):
        for in_flight, more_in_writer, shared in saves:
            assert in_flight >= STATE
            assert more_in_writer < LITTLE
            assert shared <= 0


def test_a_killed_writer_leaves_nothing_in_shared_memory(lives: tuple[Path, dict[str, Any]]) -> None:
    error, held, left = lives[1]["left after a kill"]

    assert "the writer process ended with exit code -9" in error
    assert held >= STATE
    assert left <= 0


def test_a_closed_queue_leaves_nothing_in_shared_memory(lives: tuple[Path, dict[str, Any]]) -> None:
    closed = lives[1]["closed"]

    assert closed["in use"] > 0
    assert not closed["writer left"]
    assert closed["left"] <= 0
