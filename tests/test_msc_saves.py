"""Jobs that save to a named profile: create, reuse, load, and what the ``.metadata`` says of its storage."""

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msc_profiles import KINDS, Profile, in_use, made_profile
from msc_saves import refused_on_rank, save_and_load_on_rank
from ranks import RankPool
from workload import Job, assert_holds

from megatron_ckpt_ext import latest_complete_step, verify_checkpoint
from megatron_ckpt_ext.publish.storage.interface import storage_of

pytest_plugins = ["made_checkpoints", "msc_profiles"]

MARKER = {".complete"}
DATA = {"__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__1_1.distcp"}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A job's checkpoints: step_1 was created, step_2 and step_3 reuse its layout, step_3 in a second job."""

    profile: Profile
    held: dict[int, list[dict[str, object]]]


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    folder = tmp_path_factory.mktemp("saved")
    profile = made_profile(folder, request.param)
    file, url = str(folder / "prepared.metadata"), profile.url("run")
    first = Job(directory=url, workers=2, fully_parallel=True, create=file)
    second = Job(directory=url, workers=2, fully_parallel=True, reuse=file)

    with in_use(profile):
        created = ranks.run(save_and_load_on_rank, str(profile.config), first, [1, 2])
        reused = ranks.run(save_and_load_on_rank, str(profile.config), second, [3])
        held = {step: [rank[step - 1] for rank in created] for step in (1, 2)} | {3: [rank[0] for rank in reused]}
        yield Saved(profile=profile, held=held)


def test_each_checkpoint_is_complete_with_its_marker_and_nothing_else(saved: Saved) -> None:
    for step in (1, 2, 3):
        url = saved.profile.url("run", f"step_{step}")

        report = verify_checkpoint(url)

        assert (report.problems, report.kind, report.files, report.path) == ((), "torch_dist", len(DATA), url)
        assert set(storage_of(url).names(url)) == DATA | MARKER | {".metadata", "metadata.json"}


def test_the_newest_is_found_by_prefix(saved: Saved) -> None:
    for spelling in (saved.profile.url("run"), saved.profile.url("run", ""), Path(saved.profile.url("run"))):
        found = latest_complete_step(spelling)

        assert (found.step, found.path, found.skipped) == (3, saved.profile.url("run", "step_3"), ())
    assert latest_complete_step(saved.profile.url("nothing was ever written here")).step is None


def test_a_later_save_differs_in_what_it_says_of_itself_only(saved: Saved) -> None:
    urls = [saved.profile.url("run", f"step_{step}") for step in (1, 3)]
    first, last = (pickle.load(storage_of(url).open(f"{url}/.metadata")) for url in urls)

    assert [first.storage_meta.checkpoint_id, last.storage_meta.checkpoint_id] == urls
    assert first.storage_data == last.storage_data


# The same objects through the file system of a profile.


IN_FILES = pytest.mark.parametrize("saved", ["files"], indirect=True)


@pytest.fixture
def plain(saved: Saved, tmp_path: Path) -> Path:
    """A copy of a checkpoint, as files."""
    return Path(shutil.copytree(saved.profile.plain / "run" / "step_3", tmp_path / "step_3"))


@IN_FILES
def test_stock_readers_find_every_bit_by_the_plain_path(saved: Saved, plain: Path) -> None:
    assert_holds(plain, saved.held[3])


@IN_FILES
def test_by_the_plain_path_too_the_marker_must_be_there(plain: Path) -> None:
    (plain / ".complete").unlink()

    report = verify_checkpoint(plain)

    assert report.reason == ".complete is missing: .metadata was uploaded, but not published"


@IN_FILES
@pytest.mark.parametrize(
    ("marker", "reason"),
    [
        (b"", ".complete is no marker: it is no JSON"),
        (b"[" * 4096, ".complete is no marker: it is no JSON"),
        (b'{"object": ".metadata", "length": 7, "crc32": 7}', ".complete tells of another .metadata than this one of"),
        (b"[]", ".complete tells of another .metadata than this one of"),
    ],
)
def test_by_the_plain_path_too_the_marker_must_agree(plain: Path, marker: bytes, reason: str) -> None:
    (plain / ".complete").write_bytes(marker)

    assert verify_checkpoint(plain).reason.startswith(reason)


@IN_FILES
def test_a_marker_that_is_no_file_is_not_waited_for(plain: Path) -> None:
    (plain / ".complete").unlink()
    os.mkfifo(plain / ".complete")

    assert verify_checkpoint(plain).reason == ".complete cannot be read: Not a regular file"


def test_a_checkpoint_of_files_needs_no_marker_where_it_lies_but_for_objects(
    made: Path, tmp_path: Path, files_profile: Profile
) -> None:
    shutil.copytree(made / "step_2", files_profile.plain / "run" / "step_2")

    assert verify_checkpoint(files_profile.plain / "run" / "step_2").complete
    report = verify_checkpoint(files_profile.url("run", "step_2"))
    assert report.reason == ".complete is missing: .metadata was uploaded, but not published"


def test_a_directory_that_the_client_maps_elsewhere_is_refused_before_anything_is_written(
    ranks: RankPool, tmp_path: Path
) -> None:
    profile = made_profile(tmp_path, "files")
    config = json.loads(profile.config.read_text())
    config["path_mapping"] = {f"{tmp_path}/mapped/": f"msc://{profile.name}/"}
    profile.config.write_text(json.dumps(config))

    answers = ranks.run(refused_on_rank, str(profile.config), str(tmp_path / "mapped" / "step_1"))

    assert set(answers) == {
        f"the checkpoint directory {tmp_path}/mapped/step_1 is led to the profile {profile.name} by the path_mapping "
        f"of the multi-storage client: write msc://{profile.name}/ and the rest in its place, or leave --enable-msc out"
    }
    assert list(profile.folder.iterdir()) == []
