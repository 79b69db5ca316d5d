"""Megatron's tracker file is never empty, and an unreadable one does not look like a finished job."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.integrations.tracker import TRACKER_FILE, AtomicTracker, explaining_reader

FILES = AtomicTracker(SimpleNamespace(open=open, answer=42))


def test_the_tracker_appears_when_it_is_closed(tmp_path: Path) -> None:
    tracker = tmp_path / TRACKER_FILE
    tracker.write_text("4")
    with FILES.open(str(tracker), "w") as file:
        file.write("8")
        assert tracker.read_text() == "4"
    assert tracker.read_text() == "8"
    assert [path.name for path in tmp_path.iterdir()] == [TRACKER_FILE]


def test_a_writer_that_fails_leaves_the_old_tracker(tmp_path: Path) -> None:
    tracker = tmp_path / TRACKER_FILE
    tracker.write_text("4")
    with pytest.raises(ZeroDivisionError), FILES.open(str(tracker), "w") as file:
        file.write(str(8 // 0))
    assert tracker.read_text() == "4"


def test_everything_else_is_opened_as_before(tmp_path: Path) -> None:
    with FILES.open(str(tmp_path / "other"), "w") as file:
        file.write("x")
        assert (tmp_path / "other").exists()
    with FILES.open(str(tmp_path / "other")) as file:
        assert file.read() == "x"
    assert FILES.answer == 42


def test_remote_trackers_are_left_to_their_storage(tmp_path: Path) -> None:
    opened = []
    remote = AtomicTracker(SimpleNamespace(open=lambda *args: opened.append(args)))
    remote.open(f"msc://profile/run/{TRACKER_FILE}", "w")
    assert opened == [(f"msc://profile/run/{TRACKER_FILE}", "w")]


def exiting(code: Any) -> Any:
    def read_metadata(path: str) -> Any:
        raise SystemExit(code)

    return explaining_reader(read_metadata)


def test_an_unreadable_tracker_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no complete checkpoint beside it, or remove it"):
        exiting(None)(str(tmp_path / TRACKER_FILE))
    with pytest.raises(SystemExit, match="3"):
        exiting(3)(str(tmp_path / TRACKER_FILE))
    assert explaining_reader(lambda path: (8, False))("x") == (8, False)
