"""One interface over three storages: a directory, a named profile of files, a named profile of flat objects."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msc_profiles import exit_code, in_use, made_profile

from megatron_ckpt_ext.publish.atomic import remove_file, stage_file, write_file
from megatron_ckpt_ext.publish.storage.files import Files
from megatron_ckpt_ext.publish.storage.interface import storage_of
from megatron_ckpt_ext.publish.storage.objects import Objects


@pytest.fixture(params=["directory", "files", "objects"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where a job saves, with nothing in it."""
    if request.param == "directory":
        (tmp_path / "run").mkdir()
        yield str(tmp_path / "run")
    else:
        profile = made_profile(tmp_path, request.param)
        with in_use(profile):
            yield profile.url("run")


def read(path: str) -> bytes:
    with storage_of(path).open(path) as file:
        return file.read()


def test_what_is_written_can_be_read_listed_and_removed(root: str) -> None:
    storage, path = storage_of(root), os.path.join(root, "notes")

    write_file(path, (chunk for chunk in (b"one ", b"", b"two")))

    assert (read(path), storage.size(path), storage.exists(path)) == (b"one two", 7, True)
    assert (storage.names(root), storage.subdirectories(root)) == (["notes"], [])
    write_file(path, [b"newer"])
    assert read(path) == b"newer"
    for _ in range(2):
        remove_file(path)
    assert (storage.names(root), storage.exists(path)) == ([], False)


def test_a_directory_needs_no_object_of_its_own(root: str, tmp_path: Path) -> None:
    storage = storage_of(root)
    for name in ("step_1", "step_10"):
        if storage.has_renames:
            (tmp_path / "run" / name).mkdir()
        write_file(os.path.join(root, name, "notes"), [b"x"])
    write_file(os.path.join(root, "step_2"), [b"a file"])

    assert sorted(storage.names(root)) == ["step_1", "step_10", "step_2"]
    assert sorted(storage.subdirectories(root)) == ["step_1", "step_10"]
    assert storage.names(os.path.join(root, "step_1")) == ["notes"]
    assert storage.is_directory(os.path.join(root, "step_1"))
    assert not storage.is_directory(os.path.join(root, "step_2"))
    assert not storage.is_directory(os.path.join(root, "step_3"))
    assert storage.names(os.path.join(root, "step_3")) == []


def test_sizes_by_name_and_why_there_is_none(root: str, tmp_path: Path) -> None:
    storage = storage_of(root)
    if storage.has_renames:
        (tmp_path / "run" / "below").mkdir()
    write_file(os.path.join(root, "notes"), [b"12345"])
    write_file(os.path.join(root, "below", "more"), [b"123"])

    size_of = storage.sizes(root)

    assert (size_of("notes"), size_of("below/more")) == (5, 3)
    for ask in (size_of, lambda name: storage.size(os.path.join(root, name))):
        with pytest.raises(FileNotFoundError) as missing:
            ask("absent")
        assert missing.value.strerror == "No such file or directory"
        with pytest.raises(OSError) as no_file:
            ask("below")
        assert no_file.value.strerror == "Not a regular file"


def test_a_staged_file_of_any_name_counts_only_when_it_is_published(root: str) -> None:
    path = os.path.join(root, "metadata.json")
    dropped = stage_file(path, [b"{}"])
    dropped.discard()
    dropped.discard()
    assert not storage_of(path).exists(path)

    staged = pickle.loads(pickle.dumps(stage_file(path, [b"{", b"}"])))
    assert not storage_of(path).exists(path)
    staged.publish()
    staged.discard()

    assert read(path) == b"{}"
    assert storage_of(root).names(root) == ["metadata.json"]


def test_another_process_publishes_what_this_one_staged(root: str) -> None:
    path = os.path.join(root, ".metadata")
    staged = pickle.dumps(stage_file(path, [b"the layout"]))

    assert exit_code(lambda: pickle.loads(staged).publish()) == 0

    assert read(path) == b"the layout"
    published = [".metadata"] if storage_of(root).has_renames else [".complete", ".metadata"]
    assert sorted(storage_of(root).names(root)) == published


@pytest.mark.parametrize(
    ("path", "kind", "directory"),
    [
        ("msc://profile/run/step_1", Objects, "msc://profile/run/step_1"),
        (str(Path("msc://profile/run/step_1")), Objects, "msc://profile/run/step_1"),
        ("msc://profile/run/", Objects, "msc://profile/run"),
        ("/msc://profile", Files, "/msc://profile"),
        ("msc", Files, "msc"),
        ("./msc:/x", Files, "./msc:/x"),
        ("s3://bucket/x", Files, "s3://bucket/x"),
    ],
)
def test_the_path_says_which_storage_and_pathlib_may_take_a_slash(path: str, kind: type[Any], directory: str) -> None:
    storage = storage_of(path)

    assert isinstance(storage, kind)
    assert storage.directory(path) == directory


def test_what_the_client_raises_is_an_os_error_with_a_reason(tmp_path: Path) -> None:
    with in_use(made_profile(tmp_path, "files")):
        with pytest.raises(OSError) as unknown:
            storage_of("msc://").names("msc://nobody-has-this/run")
        assert "nobody-has-this" in str(unknown.value.strerror)
