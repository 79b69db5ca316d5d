"""What is used of the multi-storage client still behaves as it was read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.msc_utils import MultiStorageClientFeature
from msc_profiles import Profile, in_use, made_profile

from megatron_ckpt_ext.compat.msc import (
    file_path,
    list_objects,
    mapped_profile,
    megatron_uses_msc,
    object_url,
    read_object,
    write_object,
)

pytest_plugins = ["msc_profiles"]

WITHOUT = """
import sys
sys.modules["multistorageclient"] = None
from megatron_ckpt_ext import verify_checkpoint
print(verify_checkpoint("/").reason)
verify_checkpoint("msc://profile/run/step_1")
"""


def test_reading_is_not_answered_from_a_cache(tmp_path: Path) -> None:
    profile = made_profile(tmp_path, "objects")
    config = json.loads(profile.config.read_text())
    config["profiles"][profile.name]["caching_enabled"] = True
    config["cache"] = {"size": "100M", "location": str(tmp_path / "cache"), "check_source_version": False}
    profile.config.write_text(json.dumps(config))
    url = profile.url("run", "x")
    with in_use(profile):
        import multistorageclient

        write_object(url, b"old")
        with multistorageclient.open(url, "rb") as file:
            assert file.read() == b"old"
        (object_file,) = profile.folder.iterdir()
        object_file.write_bytes(b"new, by another job")

        with multistorageclient.open(url, "rb") as file:
            assert file.read() == b"old"
        assert read_object(url) == b"new, by another job"


def test_an_object_that_stands_for_its_prefix_is_not_listed(tmp_path: Path) -> None:
    """As consoles of object stores make them for an empty folder."""
    profile = made_profile(tmp_path, "objects")
    with in_use(profile):
        write_object(profile.url("run", "x"), b"1")
        for name in ("bucket%2Frun%2F", "bucket%2Frun%2Fstep_1%2F"):
            (profile.folder / name).write_bytes(b"")

        assert {entry.name for entry in list_objects(profile.url("run"))} == {"step_1", "x"}


def test_only_a_profile_of_files_has_file_paths(profile: Profile) -> None:
    found = file_path(profile.url("run", "x"))

    assert found == (str(profile.folder / "run" / "x") if profile.kind == "files" else None)


def test_a_write_that_fails_uploads_nothing(files_profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    url = files_profile.url("run", "x")
    write_object(url, b"older")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_object(url, b"newer")

    monkeypatch.undo()
    assert [path.name for path in (files_profile.plain / "run").iterdir()] == ["x"]
    assert read_object(url) == b"older"


def test_a_path_that_a_mapping_leads_elsewhere_is_known(tmp_path: Path) -> None:
    profile = made_profile(tmp_path, "files")
    config = json.loads(profile.config.read_text())
    config["path_mapping"] = {"/lustre/run/": f"msc://{profile.name}/"}
    profile.config.write_text(json.dumps(config))
    with in_use(profile):
        assert mapped_profile("/lustre/run/step_1") == profile.name
        assert mapped_profile("/lustre/other/step_1") is None


def test_megatron_says_whether_it_uses_the_client() -> None:
    assert not megatron_uses_msc()
    MultiStorageClientFeature.enable()
    try:
        assert megatron_uses_msc()
    finally:
        MultiStorageClientFeature.disable()


def test_pathlib_takes_a_slash_that_the_client_gives_back(profile: Profile) -> None:
    import multistorageclient

    write_object(profile.url("x"), b"1")
    spelled = str(Path(profile.url("x")))

    assert spelled == profile.url("x").replace("//", "/")
    assert object_url(spelled) == object_url(profile.url("", "x", "")) == profile.url("x")
    assert multistorageclient.info(spelled).content_length == 1


def test_without_the_package_only_its_paths_are_refused() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}

    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.stdout == ".metadata is missing: no save was finished in this directory\n"
    assert "ConfigurationError: msc:// paths need the multi-storage client, which is not installed: pip" in done.stderr
