"""Saving into a directory that an earlier attempt left behind."""

from pathlib import Path

import pytest
import torch.distributed as dist
from msc_profiles import Profile
from ranks import RankPool
from workload import Job, checkpoint_values, save, state, values

from megatron_ckpt_ext import verify_checkpoint
from megatron_ckpt_ext.compat.msc import list_objects, write_object
from megatron_ckpt_ext.publish.clean import clear_for_save

pytest_plugins = ["msc_profiles"]

LEFT_BEHIND = (
    ".complete",
    ".metadata",
    "__0_0.distcp",
    "__0_1.distcp",
    "__1_0.distcp",
    "hint__1_1.distcp",
    "__2_0.distcp",
    "__7_0.distcp",
    ".metadata.0123456789ab.tmp",
    "metadata.json.0123456789ab.tmp",
    "metadata.json",
    "notes.txt",
    "common.pt",
)


def left(directory: Path, rank: int, *, world_size: int = 2, coordinator: bool = False) -> set[str]:
    for name in LEFT_BEHIND:
        (directory / name).write_text("old")
    clear_for_save(str(directory), rank=rank, world_size=world_size, is_coordinator=coordinator)
    return {path.name for path in directory.iterdir()}


def test_a_rank_removes_the_marker_and_its_own_files_only(tmp_path: Path) -> None:
    assert set(LEFT_BEHIND) - left(tmp_path, 1) == {".complete", ".metadata", "__1_0.distcp", "hint__1_1.distcp"}


def test_the_coordinator_also_removes_what_nobody_owns(tmp_path: Path) -> None:
    assert set(LEFT_BEHIND) - left(tmp_path, 0, coordinator=True) == {
        ".complete",
        ".metadata",
        "__0_0.distcp",
        "__0_1.distcp",
        "__2_0.distcp",
        "__7_0.distcp",
        ".metadata.0123456789ab.tmp",
        "metadata.json.0123456789ab.tmp",
    }


def test_it_is_the_same_for_objects(profile: Profile) -> None:
    url = profile.url("run")
    for rank, kept in ((1, {"__0_0.distcp", "__2_0.distcp", "metadata.json"}), (0, {"__1_0.distcp", "metadata.json"})):
        for name in (".complete", ".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "metadata.json"):
            write_object(f"{url}/{name}", b"old")
        for _ in range(2):
            clear_for_save(url, rank=rank, world_size=2, is_coordinator=rank == 0)
        assert {entry.name for entry in list_objects(url)} == kept


def test_clearing_twice_and_clearing_nothing_is_fine(tmp_path: Path) -> None:
    for _ in range(2):
        clear_for_save(str(tmp_path / "not there"), rank=0, world_size=1, is_coordinator=True)


def test_the_marker_goes_before_the_data(tmp_path: Path) -> None:
    (tmp_path / ".metadata").mkdir()  # cannot be unlinked, not even by root
    (tmp_path / "__0_0.distcp").write_text("old")

    with pytest.raises(OSError):
        clear_for_save(str(tmp_path), rank=0, world_size=1, is_coordinator=True)

    assert (tmp_path / "__0_0.distcp").exists()


def test_the_marker_of_objects_goes_before_everything_else(files_profile: Profile) -> None:
    for name in (".complete", ".metadata/cannot be removed as an object", "__0_0.distcp"):
        write_object(files_profile.url("run", name), b"old")

    with pytest.raises(OSError):
        clear_for_save(files_profile.url("run"), rank=0, world_size=1, is_coordinator=True)

    assert {path.name for path in (files_profile.plain / "run").iterdir()} == {".metadata", "__0_0.distcp"}


def saved_twice_on_rank(directory: str) -> tuple[dict[str, object], dict[str, object]]:
    """Save two states into one directory, the second with one worker less than the first."""
    kept = []
    for seed, workers in ((1, 2), (2, 1)):
        state_dict = state(seed)
        kept.append(values(state_dict))
        save(
            Job(directory=directory, workers=workers, create=f"{directory}.prepared").strategy(), directory, state_dict
        )
    return kept[0], kept[1]


def test_an_older_attempt_leaves_nothing_in_the_new_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    directory = tmp_path / "step"
    (directory).mkdir()
    for name in ("__0_5.distcp", "__9_0.distcp", ".metadata.0123456789ab.tmp"):
        (directory / name).write_text("of an attempt that died")

    kept = ranks.run(saved_twice_on_rank, str(directory))

    assert verify_checkpoint(directory).complete
    assert {path.name for path in directory.iterdir()} == {
        ".metadata",
        "metadata.json",
        "__0_0.distcp",
        "__1_0.distcp",
    }
    found = checkpoint_values(str(directory))
    assert found["rng/shard_0_2"] == kept[0][1]["rng/shard_0_2"] == {"seed": 2, "rank": 0}


def planning_fails_on_rank(directory: str) -> tuple[str, bool]:
    """Rank 1 cannot plan; afterwards the same strategy saves again."""
    strategy = Job(directory=directory, create=f"{directory}/prepared").strategy()
    save(strategy, f"{directory}/1", state(1))
    broken = state(2)
    if dist.get_rank() == 1:
        broken["model"]["weight"].data = None
    try:
        save(strategy, f"{directory}/2", broken)
        text = ""
    except Exception as error:
        text = str(error)
    save(strategy, f"{directory}/3", state(3))
    return text, verify_checkpoint(f"{directory}/3").complete


def test_a_rank_that_cannot_plan_fails_the_save_on_all(ranks: RankPool, tmp_path: Path) -> None:
    (text, complete), (other_text, _) = ranks.run(planning_fails_on_rank, str(tmp_path))

    assert text == other_text
    assert "rank 1: planning failed: CheckpointingException" in text
    assert not (tmp_path / "2" / ".metadata").exists()
    assert complete
