"""Megatron's tracker file is never empty, and an unreadable one does not look like a finished job."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core import msc_utils
from megatron.core.msc_utils import MultiStorageClientFeature
from msc_profiles import Profile

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.integrations.tracker import TRACKER_FILE, explaining_reader, tracker_writer

pytest_plugins = ["msc_profiles"]

OPENS = getattr(msc_utils, "maybe_msc", None) or SimpleNamespace(open=msc_utils.open_file)
"""What Megatron opens files with: a function before 0.19."""
FILES = tracker_writer(SimpleNamespace(open=open, answer=42))


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


def test_a_plain_path_that_the_client_leads_elsewhere_is_written_there(profile: Profile, tmp_path: Path) -> None:
    """Megatron reads it back from there."""
    config = json.loads(profile.config.read_text())
    config["path_mapping"] = {f"{tmp_path}/mapped/": f"msc://{profile.name}/"}
    profile.config.write_text(json.dumps(config))
    MultiStorageClientFeature.enable()
    try:
        with tracker_writer(OPENS).open(f"{tmp_path}/mapped/{TRACKER_FILE}", "w") as file:
            file.write("8")
        with OPENS.open(f"{tmp_path}/mapped/{TRACKER_FILE}", "r") as file:
            assert file.read() == "8"
    finally:
        MultiStorageClientFeature.disable()


@pytest.fixture
def remote(profile: Profile) -> Iterator[str]:
    """A tracker in a named profile, where Megatron's own module opens it."""
    MultiStorageClientFeature.enable()
    yield profile.url("run", TRACKER_FILE)
    MultiStorageClientFeature.disable()


def test_a_remote_tracker_appears_when_it_is_closed(remote: str) -> None:
    files = tracker_writer(OPENS)
    for before, after in (("", "4"), ("4", "8")):
        with files.open(remote, "w") as file:
            file.write(after)
            if before:
                assert files.open(remote).read() == before
        assert files.open(remote).read() == after


def test_a_writer_that_fails_leaves_the_old_remote_tracker(remote: str) -> None:
    files = tracker_writer(OPENS)
    with files.open(remote, "w") as file:
        file.write("4")
    with pytest.raises(ZeroDivisionError), files.open(remote, "w") as file:
        file.write(str(8 // 0))
    assert files.open(remote).read() == "4"


def test_a_path_of_another_storage_is_left_to_it() -> None:
    opened = []

    def open_it(*args: str) -> io.StringIO:
        opened.append(args)
        return io.StringIO()

    with tracker_writer(SimpleNamespace(open=open_it)).open(f"s3://bucket/{TRACKER_FILE}", "w") as file:
        file.write("4")
    assert opened == [(f"s3://bucket/{TRACKER_FILE}", "w")]


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


def test_an_unreadable_remote_tracker_is_the_same_error(remote: str) -> None:
    with pytest.raises(ConfigurationError, match="there is no complete checkpoint beside it, or remove it"):
        exiting(None)(remote)
