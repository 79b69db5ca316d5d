"""Files appear whole or not at all, and durably."""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from megatron_ckpt_ext.publish.atomic import stage_file, write_file
from megatron_ckpt_ext.publish.storage.files import Files

LIMIT = 64 << 10
PROGRAM = """
import os, sys
from megatron_ckpt_ext.publish.atomic import write_file
def chunks():
    yield b"half of it" * 100_000
    os.kill(os.getpid(), 9)
write_file(sys.argv[1], chunks())
"""


@pytest.fixture
def little_space() -> Iterator[None]:
    """No file of this process may grow beyond `LIMIT` bytes: the kernel refuses the write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The real fsync and rename calls, in order, with the path each is about."""
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_rename(source: str, target: str) -> None:
        calls.append(("rename", target))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    return calls


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("older", [None, b"older content"], ids=["new", "replaced"])
def test_a_file_appears_with_all_its_bytes(tmp_path: Path, older: bytes | None) -> None:
    path = tmp_path / "file"
    if older is not None:
        path.write_bytes(older)

    write_file(str(path), (chunk for chunk in (b"one ", b"", b"two")))

    assert path.read_bytes() == b"one two"
    assert names(tmp_path) == ["file"]


def test_a_relative_path_without_a_directory_works(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        write_file("file", [b"content"])

    assert names(tmp_path) == ["file"]


def test_bytes_are_durable_before_the_rename_and_the_rename_afterwards(
    tmp_path: Path, journal: list[tuple[str, str]]
) -> None:
    path = str(tmp_path / "file")

    staged = Files().stage(path, [b"content"])

    assert journal == [("fsync", staged.temporary)]
    assert Path(staged.temporary).read_bytes() == b"content"
    assert Path(staged.temporary).parent == tmp_path
    staged.publish()
    assert journal[1:] == [("rename", path), ("fsync", str(tmp_path))]


def test_a_staged_file_is_not_there_yet_and_can_be_discarded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"older content")

    staged = stage_file(str(path), [b"newer content"])
    assert path.read_bytes() == b"older content"
    staged.discard()
    staged.discard()

    assert names(tmp_path) == ["file"]
    assert path.read_bytes() == b"older content"


def test_discarding_a_published_file_keeps_it(tmp_path: Path) -> None:
    staged = stage_file(str(tmp_path / "file"), [b"content"])
    staged.publish()

    staged.discard()

    assert (tmp_path / "file").read_bytes() == b"content"


def test_two_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    first = stage_file(str(tmp_path / "file"), [b"first"])
    second = stage_file(str(tmp_path / "file"), [b"second"])

    second.publish()
    first.publish()

    assert (tmp_path / "file").read_bytes() == b"first"
    assert names(tmp_path) == ["file"]


@pytest.mark.usefixtures("little_space")
def test_a_write_that_finds_no_space_leaves_the_older_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"older content")

    with pytest.raises(OSError, match="File too large"):
        write_file(str(path), [b"x" * LIMIT, b"too much"])

    assert names(tmp_path) == ["file"]
    assert path.read_bytes() == b"older content"


def test_chunks_that_fail_leave_the_older_file_and_nothing_else(tmp_path: Path) -> None:
    def chunks() -> Iterable[bytes]:
        yield b"half of it"
        raise RuntimeError("the other half cannot be made")

    path = tmp_path / "file"
    path.write_bytes(b"older content")

    with pytest.raises(RuntimeError, match="the other half"):
        write_file(str(path), chunks())

    assert names(tmp_path) == ["file"]
    assert path.read_bytes() == b"older content"


def test_a_rename_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()

    with pytest.raises(OSError, match="directory"):
        write_file(str(tmp_path / "file"), [b"content"])

    assert names(tmp_path) == ["file"]
    staged = Files().stage(str(tmp_path / "file"), [b"content"])
    with pytest.raises(OSError, match="directory"):
        staged.publish()
    assert Path(staged.temporary).read_bytes() == b"content"


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_file(str(tmp_path / "absent" / "file"), [b"content"])

    assert names(tmp_path) == []


def test_a_writer_that_is_killed_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"older content")

    done = subprocess.run([sys.executable, "-c", PROGRAM, path], env=_environment(), timeout=60, check=False)

    assert done.returncode == -9
    assert path.read_bytes() == b"older content"
    assert [name for name in names(tmp_path) if name != "file" and not name.endswith(".tmp")] == []


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
