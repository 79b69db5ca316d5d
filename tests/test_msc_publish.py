"""Objects have no rename: the marker is last, and a process killed at any step before it leaves nothing complete."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msc_profiles import Profile, exit_code

from megatron_ckpt_ext import latest_complete_step, verify_checkpoint
from megatron_ckpt_ext.publish.atomic import remove_file, stage_file, write_file
from megatron_ckpt_ext.publish.clean import clear_for_save
from megatron_ckpt_ext.publish.storage.interface import storage_of

pytest_plugins = ["made_checkpoints", "msc_profiles"]

STEPS = ("rename", "remove", "unlink")
"""Calls of ``os`` in which an object appears or goes, in both kinds of profile."""


def save_again(source: Path, url: str) -> None:
    """Save a checkpoint into a place that may hold another: what the ranks of a job do, one behind the other."""
    for rank in range(2):
        clear_for_save(url, rank=rank, world_size=2, is_coordinator=rank == 0)
    for file in sorted(source.glob("*.distcp")):
        write_file(f"{url}/{file.name}", [file.read_bytes()])
    staged = [stage_file(f"{url}/{name}", [(source / name).read_bytes()]) for name in ("metadata.json", ".metadata")]
    for waiting in staged:
        waiting.publish()
        waiting.discard()


def before_step(number: int, act: Callable[[], object]) -> Callable[[], None]:
    """Return what does ``act``, but is killed before the step of this number at which something appears or goes."""

    def killed() -> None:
        left = iter(range(number))

        def counted(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if next(left, None) is None:
                os.kill(os.getpid(), 9)
            return real(*args, **options)

        for name in STEPS:  # in a process of its own
            setattr(os, name, partial(counted, getattr(os, name)))
        act()

    return killed


@pytest.fixture
def url(profile: Profile) -> str:
    """Where the checkpoint is saved."""
    return profile.url("run", "step_2")


def test_a_writer_killed_at_any_step_leaves_the_old_checkpoint_or_none_until_the_marker(
    made: Path, profile: Profile, url: str, tmp_path: Path
) -> None:
    save_again(made / "step_1", url)
    before = Path(shutil.copytree(profile.folder, tmp_path / "before"))

    complete = []
    for number in range(100):
        shutil.rmtree(profile.folder)
        shutil.copytree(before, profile.folder)
        code = exit_code(before_step(number, lambda: save_again(made / "step_2", url)))
        complete.append(verify_checkpoint(url).complete)
        assert latest_complete_step(profile.url("run")).step == (2 if complete[-1] else None)
        if code == 0:
            break
        assert code == -9
        save_again(made / "step_2", url)
        assert verify_checkpoint(url).complete

    # Before anything happens the old one is there. The marker, .metadata and two files go; two files, .metadata and
    # metadata.json come; nothing is complete until the marker came, too.
    assert complete == [True] + [False] * 8 + [True]


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_part_of_the_metadata_is_not_complete(made: Path, profile: Profile, url: str, cut: int) -> None:
    """As a storage could leave it that is not all or nothing, whatever else is there."""
    save_again(made / "step_2", url)
    (metadata,) = (file for file in profile.folder.rglob("*") if file.name.endswith(".metadata"))
    metadata.write_bytes(metadata.read_bytes()[:cut])

    assert verify_checkpoint(url).reason.startswith(".complete tells of another .metadata than this one of ")


def test_another_metadata_than_the_marker_tells_of_is_not_complete(made: Path, profile: Profile, url: str) -> None:
    save_again(made / "step_2", url)
    (metadata,) = (file for file in profile.folder.rglob("*") if file.name.endswith(".metadata"))
    content = metadata.read_bytes()
    metadata.write_bytes(content.replace(b"step_2", b"step_3"))

    assert verify_checkpoint(url).reason.startswith(".complete tells of another .metadata than this one of ")


@pytest.mark.parametrize("missing", [".metadata", "metadata.json", "__1_0.distcp"])
def test_the_marker_alone_does_not_make_a_checkpoint_complete(made: Path, url: str, missing: str) -> None:
    save_again(made / "step_2", url)
    remove_file(f"{url}/{missing}")

    report = verify_checkpoint(url)

    assert missing in report.reason
    assert not report.complete


def test_staging_takes_the_old_marker_away(made: Path, url: str) -> None:
    save_again(made / "step_2", url)
    content = (made / "step_2" / ".metadata").read_bytes()

    staged = stage_file(f"{url}/.metadata", [content])

    assert verify_checkpoint(url).reason == ".complete is missing: .metadata was uploaded, but not published"
    staged.publish()
    assert verify_checkpoint(url).complete


def test_discarding_takes_back_what_was_not_published(made: Path, url: str) -> None:
    save_again(made / "step_2", url)
    content = (made / "step_2" / ".metadata").read_bytes()
    staged = stage_file(f"{url}/.metadata", [content])

    for _ in range(2):
        staged.discard()

    assert verify_checkpoint(url).reason == ".metadata is missing: no save was finished in this directory"


def test_discarding_keeps_what_was_published(made: Path, url: str) -> None:
    save_again(made / "step_2", url)
    staged = stage_file(f"{url}/.metadata", [(made / "step_2" / ".metadata").read_bytes()])
    staged.publish()

    staged.discard()

    assert verify_checkpoint(url).complete


def test_a_marker_that_cannot_be_written_publishes_nothing(
    made: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_again(made / "step_2", url)
    rename = os.rename

    def full(source: Any, target: Any) -> None:
        if str(target).endswith(".complete"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(f"{url}/.metadata", [(made / "step_2" / ".metadata").read_bytes()])

    monkeypatch.undo()
    assert not storage_of(url).exists(f"{url}/.metadata")
    assert not verify_checkpoint(url).complete


def test_chunks_that_fail_change_nothing(made: Path, url: str) -> None:
    save_again(made / "step_2", url)

    def chunks() -> Any:
        yield b"half of it"
        raise RuntimeError("the other half cannot be made")

    with pytest.raises(RuntimeError, match="the other half"):
        write_file(f"{url}/.metadata", chunks())

    assert verify_checkpoint(url).complete


def test_a_prefix_with_nothing_below_is_no_checkpoint(profile: Profile, url: str) -> None:
    assert verify_checkpoint(url).reason == f"{url!r} is no directory"
    assert verify_checkpoint("msc://nobody-has-this/run").reason.startswith(".metadata cannot be read: ValueError: ")


def test_files_of_the_client_that_a_killed_writer_left_are_removed(files_profile: Profile) -> None:
    folder = files_profile.plain / "run"
    folder.mkdir()
    for name in ("..metadata.tmp", "..complete.tmp", ".metadata.json.tmp", ".notes.tmp"):
        (folder / name).write_text("left")

    clear_for_save(files_profile.url("run"), rank=0, world_size=1, is_coordinator=True)

    assert [path.name for path in folder.iterdir()] == [".notes.tmp"]
