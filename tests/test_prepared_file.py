"""The prepared file: what it holds, who can read it, what a rank reads of it, and what damage or malice does to it."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prepared_files import (
    FINGERPRINT,
    Ranges,
    crafted_bytes,
    layout,
    prepared_bytes,
    slice_of,
    trailer_of,
    written,
)
from ranks import RankPool
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from workload import Job, save_series_on_rank

from megatron_ckpt_ext.emulation.cpu import CpuEmulation
from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.items import describe_metadata, locators_of
from megatron_ckpt_ext.metadata.layout import Slice
from megatron_ckpt_ext.metadata.prepared import FingerprintMismatchError, PreparedMetadata

RANKS = 4


class _RunsCommand:
    """Pickles to a call of ``os.system``."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        from os import system

        return system, (self.command,)


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

    published = b"".join(PreparedMetadata.load(path, 0, 2).metadata_chunks(meta))

    assert pickle.loads(published) == replace(metadata, storage_meta=meta)
    with pytest.raises(PreparedFileError, match="only the coordinator"):
        PreparedMetadata.load(path, 1, 2).metadata_chunks(meta)


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
    published = pickle.loads(b"".join(loaded.metadata_chunks(stock.storage_meta)))
    assert published.state_dict_metadata == stock.state_dict_metadata
    assert published.storage_data == stock.storage_data
    assert published.planner_data == stock.planner_data
    assert published.storage_meta.checkpoint_id == str(directory)


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

    published = pickle.loads(b"".join(loaded.metadata_chunks(None)))
    assert vars(published).keys() == vars(layout(2)).keys()
    assert published.storage_data == metadata.storage_data


@pytest.mark.parametrize("rank", [0, 3])
def test_a_truncated_file_is_refused(tmp_path: Path, rank: int) -> None:
    data = prepared_bytes(layout(RANKS))
    parts = Ranges.of(data)
    complete_pickle = parts.suffix.stop
    boundaries = {part.start for part in (*parts.sections, *parts.entries, parts.header, parts.footer)}
    around = {cut + shift for cut in boundaries for shift in (-1, 0, 1)}
    lengths = {0, 1, *around, *range(2, len(data), 37), len(data) - 1} - {complete_pickle}

    for length in lengths:
        path = written(tmp_path / "prepared", data[:length])
        with pytest.raises(PreparedFileError, match=path):
            PreparedMetadata.load(path, rank, RANKS)


def test_a_file_cut_right_behind_its_pickle_is_a_plain_metadata(tmp_path: Path) -> None:
    metadata = layout(RANKS)
    data = prepared_bytes(metadata)
    path = written(tmp_path / "prepared", data[: Ranges.of(data).suffix.stop])

    loaded = PreparedMetadata.load(path, 3, RANKS)

    assert not loaded.in_our_format
    assert loaded.slice.locators == locators_of(metadata, 3)


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prepared") / "file"
    path.write_bytes(prepared_bytes(layout(RANKS)))
    return path


@pytest.mark.parametrize("rank", [0, 2])
@given(data=st.data())
def test_a_flipped_bit_is_refused_where_a_rank_reads(sound_file: Path, rank: int, data: st.DataObject) -> None:
    content = sound_file.read_bytes()
    parts = Ranges.of(content)
    read = [parts.footer, parts.header, parts.entries[rank], parts.sections[rank]]
    read += [parts.body] if rank == 0 else []
    position = data.draw(st.sampled_from(read).flatmap(st.sampled_from), label="byte")
    flipped = _flipped(content, position, data.draw(st.integers(0, 7), label="bit"))

    with pytest.raises(PreparedFileError, match="flipped"):
        PreparedMetadata.load(written(sound_file.with_name("flipped"), flipped), rank, RANKS)


@pytest.mark.parametrize("rank", [0, 3])
def test_every_flipped_bit_of_the_footer_is_refused(sound_file: Path, rank: int) -> None:
    content = sound_file.read_bytes()

    for position in Ranges.of(content).footer:
        for bit in range(8):
            path = written(sound_file.with_name("flipped"), _flipped(content, position, bit))
            with pytest.raises(PreparedFileError, match="flipped"):
                PreparedMetadata.load(path, rank, RANKS)


@given(data=st.data())
def test_a_flipped_bit_in_the_part_of_another_rank_changes_nothing(sound_file: Path, data: st.DataObject) -> None:
    content = sound_file.read_bytes()
    parts = Ranges.of(content)
    position = data.draw(st.sampled_from([parts.sections[2], parts.entries[2], parts.body]).flatmap(st.sampled_from))
    flipped = written(sound_file.with_name("other"), _flipped(content, position, data.draw(st.integers(0, 7))))

    assert PreparedMetadata.load(flipped, 1, RANKS) == PreparedMetadata.load(str(sound_file), 1, RANKS)


def test_a_newer_format_is_refused_by_its_version(tmp_path: Path) -> None:
    content = prepared_bytes(layout(2))
    newer = content[: Ranges.of(content).footer.start] + trailer_of(content)._replace(version=2).packed()

    with pytest.raises(PreparedFileError, match="format version 2, newer than 1.*upgrade megatron-ckpt-ext"):
        PreparedMetadata.load(written(tmp_path / "prepared", newer), 0, 2)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "damaged"),
        (b"MCKPTEXT", "damaged"),
        (b"\0" * 4096, "damaged"),
        (b"{}" * 4096, "damaged"),
        (pickle.dumps({"a": 1}), "holds a dict, not a checkpoint's Metadata"),
        (pickle.dumps(Metadata({})), "holds a Metadata"),
        (pickle.dumps(layout(2)) + b"more", "bytes follow the pickled Metadata"),
    ],
    ids=["empty", "magic_only", "zeros", "text", "dict", "no_locators", "something_behind"],
)
def test_what_is_no_metadata_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = written(tmp_path / "prepared", content)

    with pytest.raises(PreparedFileError, match=problem) as caught:
        PreparedMetadata.load(path, 0, 2)
    assert path in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PreparedFileError, match=f"{tmp_path}/absent.*No such file"):
        PreparedMetadata.load(str(tmp_path / "absent"), 0, 2)
    with pytest.raises(PreparedFileError, match=f"{tmp_path}.*directory"):
        PreparedMetadata.load(str(tmp_path), 0, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plain_file_that_would_run_code_runs_nothing(tmp_path: Path, rank: int) -> None:
    metadata = layout(2)
    metadata.planner_data = _RunsCommand(f"touch {tmp_path}/executed")
    path = written(tmp_path / "prepared", pickle.dumps(metadata))

    with pytest.raises(PreparedFileError, match=f"{path}.*(posix|os).system.*nothing was run"):
        PreparedMetadata.load(path, rank, 2)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_pickle_in_front_of_a_trailer_is_never_run(tmp_path: Path, rank: int) -> None:
    metadata = layout(2)
    evil = pickle.dumps(_RunsCommand(f"touch {tmp_path}/executed"))[:-1]
    sections = [slice_of(metadata, each).to_json() for each in range(2)]
    path = written(tmp_path / "prepared", crafted_bytes(body=evil, sections=sections))

    PreparedMetadata.load(path, rank, 2)

    assert not (tmp_path / "executed").exists()


LOCATOR = ["weight", [0, 0], "__0_0.distcp", 0, 8]


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (2, "/etc/passwd"),
        (2, "../__0_0.distcp"),
        (2, "a/../../__0_0.distcp"),
        (2, "a\\..\\__0_0.distcp"),
        (2, "a\0__0_0.distcp"),
        (2, ""),
        (2, 7),
        (2, ["__0_0.distcp"]),
        (2, None),
        (3, -1),
        (4, -8),
        (3, 1 << 63),
        (4, 1 << 200),
        (3, "0"),
        (4, 8.0),
        (4, float("nan")),
        (4, None),
        (1, 3),
        (1, [float("inf")]),
        (1, ["zero"]),
        (1, [None]),
    ],
    ids=repr,
)
def test_a_crafted_locator_is_refused(tmp_path: Path, position: int, value: object) -> None:
    locator: list[Any] = list(LOCATOR)
    locator[position] = value
    section = {"rank": 0, "locators": [locator], "held": []}
    with pytest.raises(PreparedFileError):
        Slice.from_json(section)
    path = written(tmp_path / "prepared", crafted_bytes(sections=[section, section]))

    with pytest.raises(PreparedFileError, match=path):
        PreparedMetadata.load(path, 0, 2)


@pytest.mark.parametrize(
    "section",
    [
        [],
        {},
        {"rank": 0, "locators": {}, "held": [[1]]},
        {"rank": 0, "locators": 5, "held": []},
        {"rank": 0, "locators": [LOCATOR[:-1]], "held": []},
        {"rank": float("inf"), "locators": [], "held": []},
        {"rank": 1, "locators": [], "held": []},
        {"rank": None, "locators": [], "held": []},
        b"\xff\xfe",
        b"[" * 200_000,
    ],
    ids=lambda section: repr(section)[:40],
)
def test_a_crafted_section_is_refused(tmp_path: Path, section: object) -> None:
    path = written(tmp_path / "prepared", crafted_bytes(sections=[section, section]))

    with pytest.raises(PreparedFileError, match=path):
        PreparedMetadata.load(path, 0, 2)


@pytest.mark.parametrize(
    "header", [[], {}, {"fingerprint": None}, {"fingerprint": [1]}, {"fingerprint": "2"}, b"}"], ids=repr
)
def test_a_crafted_header_is_refused(tmp_path: Path, header: object) -> None:
    section = slice_of(layout(2), 0).to_json()
    path = written(tmp_path / "prepared", crafted_bytes(sections=[section, section], header=header))

    with pytest.raises(PreparedFileError, match=path):
        PreparedMetadata.load(path, 0, 2)


def test_json_that_is_no_object_is_damage(tmp_path: Path) -> None:
    section = slice_of(layout(2), 0).to_json()
    bad_header = written(tmp_path / "header", crafted_bytes(sections=[section, section], header=[]))
    bad_section = written(tmp_path / "section", crafted_bytes(sections=[[], section]))

    with pytest.raises(PreparedFileError, match="is damaged: its header"):
        PreparedMetadata.load(bad_header, 0, 2)
    with pytest.raises(PreparedFileError, match="is damaged: its section of rank 0"):
        PreparedMetadata.load(bad_section, 0, 2)


@pytest.mark.parametrize("entry", [(1 << 40, 10, 0), ((1 << 64) - 1, 1, 0), (0, 1 << 63, 0), (0, 1 << 31, 0)], ids=repr)
def test_a_section_outside_the_file_is_refused(tmp_path: Path, entry: tuple[int, int, int]) -> None:
    section = slice_of(layout(2), 0).to_json()
    path = written(tmp_path / "prepared", crafted_bytes(sections=[section, section], entries={0: entry}))

    with pytest.raises(PreparedFileError, match=f"{path}.*section of rank 0"):
        PreparedMetadata.load(path, 0, 2)


@pytest.mark.parametrize(
    "lie",
    [
        {"index_offset": 1 << 63},
        {"index_offset": (1 << 64) - 1},
        {"header_offset": 1 << 63},
        {"header_length": (1 << 32) - 1},
        {"body_length": 1 << 63},
    ],
    ids=repr,
)
def test_a_footer_that_points_outside_the_file_is_refused(tmp_path: Path, lie: dict[str, Any]) -> None:
    section = slice_of(layout(2), 0).to_json()
    path = written(tmp_path / "prepared", crafted_bytes(sections=[section, section], **lie))

    with pytest.raises(PreparedFileError, match=f"{path}.*damaged"):
        PreparedMetadata.load(path, 0, 2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("file", ["../__1_0.distcp", "/tmp/__1_0.distcp", "model-00001.distcp", "__x_0.distcp", ""])
def test_a_plain_file_with_a_bad_file_name_is_refused_by_every_rank(tmp_path: Path, file: str, rank: int) -> None:
    metadata = layout(2)
    index, info = next((i, info) for i, info in metadata.storage_data.items() if "__1_" in info.relative_path)
    metadata.storage_data[index] = replace(info, relative_path=file)
    path = written(tmp_path / "prepared", pickle.dumps(metadata))

    with pytest.raises(PreparedFileError, match=path):
        PreparedMetadata.load(path, rank, 2)


@pytest.mark.parametrize("missing", ["relative_path", "offset", "length"])
def test_a_plain_file_with_a_garbled_attribute_is_refused(tmp_path: Path, missing: str) -> None:
    garbled = missing[:-1] + "X"
    content = pickle.dumps(layout(2), protocol=2).replace(missing.encode(), garbled.encode())
    path = written(tmp_path / "prepared", content)

    with pytest.raises(PreparedFileError, match=path):
        PreparedMetadata.load(path, 0, 2)


@pytest.mark.parametrize("field", ["state_dict_metadata", "storage_data"])
@pytest.mark.parametrize("value", [[], 3, {"a": 1}, {3: None}, None], ids=repr)
def test_a_plain_file_of_other_types_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    path = written(tmp_path / "prepared", pickle.dumps(replace(layout(2), **{field: value})))

    with pytest.raises(PreparedFileError, match=path):
        PreparedMetadata.load(path, 0, 2)


def test_an_in_memory_metadata_without_locators_is_refused() -> None:
    with pytest.raises(PreparedFileError, match="no storage_data: pass one read back from a checkpoint"):
        PreparedMetadata.from_metadata(Metadata({}), 0)


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


def _flipped(content: bytes, position: int, bit: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]
