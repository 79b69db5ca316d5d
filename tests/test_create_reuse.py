"""Create, then reuse: the round trip, the files, and the facts that reuse rests on."""

import pickle
from pathlib import Path

import pytest
from ranks import RankPool
from torch.distributed.checkpoint.metadata import Metadata
from workload import Job, assert_holds, save_series_on_rank

from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.prepared import FingerprintMismatchError, PreparedMetadata


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fully_parallel", [False, True], ids=["plain", "fully_parallel"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_round_trip(ranks: RankPool, tmp_path: Path, world_size: int, workers: int, fully_parallel: bool) -> None:
    file = str(tmp_path / "prepared.metadata")
    create = Job(directory=str(tmp_path), workers=workers, fully_parallel=fully_parallel, create=file)
    reuse = Job(directory=str(tmp_path), workers=workers, fully_parallel=fully_parallel, reuse=file)

    held = ranks.run(save_series_on_rank, create, [1, 2], world_size=world_size)
    held_later = ranks.run(save_series_on_rank, reuse, [3, 4], world_size=world_size)

    for number, seed in enumerate([1, 2]):
        assert_holds(tmp_path / f"step_{seed}", [rank[number] for rank in held])
    for number, seed in enumerate([3, 4]):
        assert_holds(tmp_path / f"step_{seed}", [rank[number] for rank in held_later])


def test_a_file_that_does_not_fit_is_replaced_by_the_first_save_of_a_job_that_creates(
    ranks: RankPool, tmp_path: Path
) -> None:
    file = str(tmp_path / "prepared.metadata")
    ranks.run(save_series_on_rank, Job(directory=str(tmp_path), create=file), [1])
    with pytest.raises(FingerprintMismatchError, match="workers per rank is 2 in this job and 1 in the prepared"):
        PreparedMetadata.load(file, 0, 2, expected=Fingerprint(workers_per_rank=2))

    ranks.run(save_series_on_rank, Job(directory=str(tmp_path), workers=2, create=file), [2])
    held = ranks.run(save_series_on_rank, Job(directory=str(tmp_path), workers=2, reuse=file), [3])

    assert PreparedMetadata.load(file, 0, 2, expected=Fingerprint(workers_per_rank=2)).fingerprint.workers_per_rank == 2
    assert_holds(tmp_path / "step_3", [rank[0] for rank in held])


def test_the_prepared_file_is_a_complete_metadata_for_plain_pickle(ranks: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "prepared.metadata"
    ranks.run(save_series_on_rank, Job(directory=str(tmp_path), create=str(file)), [1])

    prepared = pickle.loads(file.read_bytes())
    published = pickle.loads((tmp_path / "step_1" / ".metadata").read_bytes())

    assert isinstance(prepared, Metadata)
    assert prepared == published
    assert not hasattr(published, "all_local_plans")


def test_two_saves_differ_in_storage_meta_only(ranks: RankPool, tmp_path: Path) -> None:
    file = str(tmp_path / "prepared.metadata")
    ranks.run(save_series_on_rank, Job(directory=str(tmp_path), create=file), [1, 2])

    first, second = (pickle.loads((tmp_path / f"step_{seed}" / ".metadata").read_bytes()) for seed in (1, 2))

    assert first.storage_meta.checkpoint_id == str(tmp_path / "step_1")
    assert second.storage_meta.checkpoint_id == str(tmp_path / "step_2")
    assert first.storage_meta.save_id != second.storage_meta.save_id
    assert first.storage_data == second.storage_data
    assert first.state_dict_metadata == second.state_dict_metadata
