"""Prepared files that lost or changed bytes: refused by every rank that reads the part in question, and named."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared_files import Ranges, layout, prepared_bytes, trailer_of, written
from torch.distributed.checkpoint.metadata import Metadata

from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.items import locators_of
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata

RANKS = 4


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
        PreparedMetadata.load(written(sound_file.with_name("flipped"), flipped), rank, RANKS).in_memory()


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

    sound = PreparedMetadata.load(str(sound_file), 1, RANKS)
    assert PreparedMetadata.load(flipped, 1, RANKS) == replace(sound, path=flipped)


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


def _flipped(content: bytes, position: int, bit: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]
