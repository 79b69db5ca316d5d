"""The prepared file: what it holds, who can read it, and what a rank reads of it."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prepared_files import FINGERPRINT, Ranges, crafted_bytes, layout, prepared_bytes, published, slice_of, written
from ranks import RankPool
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from workload import Job, save_series_on_rank

from megatron_ckpt_ext.emulation.cpu import CpuEmulation
from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.items import describe_metadata, locators_of
from megatron_ckpt_ext.metadata.prepared import FingerprintMismatchError, PreparedMetadata


def test_each_rank_reads_its_own_part(tmp_path: Path) -> None:
    metadata = layout(3, workers=2)
    path = written(tmp_path / "prepared", prepared_bytes(metadata))

    for rank in range(3):
        loaded = PreparedMetadata.load(path, rank, 3, expected=replace(FINGERPRINT, world_size=3))
        assert loaded.slice == slice_of(metadata, rank)
        assert loaded.fingerprint == replace(FINGERPRINT, world_size=3)
        assert loaded.identity == "file-1"
        assert loaded.in_our_format
        assert (loaded.body is not None) == (rank == 0)
        assert pickle.loads(pickle.dumps(loaded)) == loaded


def test_the_coordinator_may_be_another_rank(tmp_path: Path) -> None:
    path = written(tmp_path / "prepared", prepared_bytes(layout(2)))

    assert PreparedMetadata.load(path, 0, 2, coordinator=1).body is None
    assert PreparedMetadata.load(path, 1, 2, coordinator=1).body is not None


def test_readers_that_only_unpickle_find_the_whole_metadata(tmp_path: Path) -> None:
    metadata = layout(2)
    (tmp_path / ".metadata").write_bytes(prepared_bytes(metadata))

    with open(tmp_path / ".metadata", "rb") as file:
        assert pickle.load(file) == metadata
    read = FileSystemReader(tmp_path).read_metadata()
    assert replace(read, storage_meta=metadata.storage_meta) == metadata


def test_only_the_coordinator_can_publish(tmp_path: Path) -> None:
    metadata = layout(2)
    path = written(tmp_path / "prepared", prepared_bytes(metadata))
    meta = StorageMeta(checkpoint_id="/checkpoints/step_9", save_id="ninth")

    assert published(PreparedMetadata.load(path, 0, 2), meta) == replace(metadata, storage_meta=meta)
    assert isinstance(PreparedMetadata.load(path, 0, 2).in_memory().body, bytes)
    with pytest.raises(PreparedFileError, match="loaded for another coordinator"):
        PreparedMetadata.load(path, 1, 2).in_memory()


@pytest.mark.parametrize("as_path", [False, True], ids=["text_id", "path_id"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_metadata_of_a_torch_checkpoint_is_accepted(tmp_path: Path, as_path: bool) -> None:
    directory = tmp_path / "checkpoint"
    state = {"weight": torch.ones(4, 2), "nested": {"bias": torch.zeros(3, dtype=torch.bfloat16)}, "step": 7}
    save_checkpoint(state, checkpoint_id=directory if as_path else str(directory), no_dist=True)
    stock = FileSystemReader(directory).read_metadata()

    loaded = PreparedMetadata.load(str(directory / ".metadata"), 0, 1)

    assert loaded.slice.locators == locators_of(stock, 0)
    assert loaded.slice.held is None
    assert loaded.known == describe_metadata(stock)
    assert loaded.fingerprint.world_size == loaded.fingerprint.workers_per_rank == 1
    assert not loaded.in_our_format
    found = published(loaded, stock.storage_meta)
    assert found.state_dict_metadata == stock.state_dict_metadata
    assert found.storage_data == stock.storage_data
    assert found.planner_data == stock.planner_data
    assert found.storage_meta is not None
    assert found.storage_meta.checkpoint_id == str(directory)


def _save_stock_on_rank(directory: str) -> None:
    with CpuEmulation(megatron=False):  # the stock finalize asks for the current CUDA device
        save_series_on_rank(Job(directory=directory), [1])


def test_the_metadata_of_a_stock_megatron_checkpoint_is_accepted(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_save_stock_on_rank, str(tmp_path))
    stock = FileSystemReader(tmp_path / "step_1").read_metadata()

    for rank in range(2):
        loaded = PreparedMetadata.load(str(tmp_path / "step_1" / ".metadata"), rank, 2)
        assert loaded.slice.locators == locators_of(stock, rank)
        assert loaded.fingerprint.world_size == 2
    assert locators_of(stock, 0).keys() | locators_of(stock, 1).keys() == describe_metadata(stock).keys()


def test_local_plans_are_accepted_and_not_carried(tmp_path: Path) -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"weight": torch.ones(4, 2), "step": 7}, is_coordinator=True)
    plan = planner.create_local_plan()
    metadata = layout(2)
    metadata.storage_meta = StorageMeta(checkpoint_id=tmp_path, save_id="first")
    metadata.all_local_plans = [plan, plan]  # type: ignore[attr-defined]  # as NVRx does it
    path = written(tmp_path / ".metadata", pickle.dumps(metadata))
    assert pickle.loads(Path(path).read_bytes()).all_local_plans == [plan, plan]

    loaded = PreparedMetadata.load(path, 0, 2)

    found = published(loaded, None)
    assert vars(found).keys() == vars(layout(2)).keys()
    assert found.storage_data == metadata.storage_data


def test_another_world_size_always_counts(tmp_path: Path) -> None:
    ours = written(tmp_path / "ours", prepared_bytes(layout(2)))
    plain = written(tmp_path / "plain", pickle.dumps(layout(2)))

    for path, in_our_format in ((ours, True), (plain, False)):
        with pytest.raises(FingerprintMismatchError, match="world size is 3 in this job and 2 in the") as caught:
            PreparedMetadata.load(path, 0, 3)
        assert caught.value.ours is in_our_format


def test_a_rank_reads_only_its_own_part_of_a_large_file(tmp_path: Path) -> None:
    """Counts what this process gets from read calls of the kernel, whoever makes them."""
    metadata = layout(64)
    large = {"rank": 0, "locators": [], "held": [["x" * 200_000, None, "object"]]}
    sections = [slice_of(metadata, rank).to_json() if rank == 5 else large for rank in range(64)]
    path = written(tmp_path / "prepared", crafted_bytes(sections=sections, body=bytes(5_000_000)))
    parts = Ranges.of(Path(path).read_bytes())

    before = _bytes_read()
    loaded = PreparedMetadata.load(path, 5, 64)
    spent = _bytes_read() - before

    assert loaded.slice == slice_of(metadata, 5)
    assert Path(path).stat().st_size > 17_000_000
    overhead = 64 << 10  # buffers of a few KiB around the footer, the header and the index entry
    assert spent < len(parts.sections[5]) + len(parts.header) + overhead


def _bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
