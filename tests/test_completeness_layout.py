"""A `.metadata` that loads but says something wrong: refused, and item and numbers are named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_checkpoints import assert_problem, chunks_of, edited, place_of
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from workload import COLUMNS, ROWS

from megatron_ckpt_ext import verify_checkpoint
from megatron_ckpt_ext.compat.dcp import StorageInfo
from megatron_ckpt_ext.publish.completeness import MOST_PROBLEMS

pytest_plugins = ["made_checkpoints"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WEIGHT = "model.weight"
any_place: Any = StorageInfo
"""Takes arguments of any type, as a pickle does."""


def disguised(name: str) -> WriteItem:
    """A key that is unequal to the name of an item but has what a name has; its place would hide the item's own."""
    key = WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
    object.__setattr__(key, "fqn", name)
    object.__setattr__(key, "offset", None)
    return key


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: setattr(m, "state_dict_metadata", None),
        lambda m: setattr(m, "state_dict_metadata", [1]),
        lambda m: m.state_dict_metadata.update({7: BytesStorageMetadata()}),
        lambda m: m.state_dict_metadata[WEIGHT].chunks.append(None),
        lambda m: setattr(m.state_dict_metadata[WEIGHT], "chunks", 3),
        lambda m: setattr(m.state_dict_metadata[WEIGHT], "size", "ab"),
        lambda m: setattr(m.state_dict_metadata[WEIGHT].chunks[0], "sizes", (10**5000, 1)),
        lambda m: setattr(m.state_dict_metadata[WEIGHT].chunks[0], "offsets", None),
        lambda m: delattr(m.state_dict_metadata[WEIGHT].chunks[0], "offsets"),
        lambda m: m.storage_data.update({"rng": any_place("__0_0.distcp", 0, 1)}),
        lambda m: m.storage_data.update({disguised("rng/shard_0_2"): any_place("__0_0.distcp", 0, 1)}),
        lambda m: m.storage_data.update({MetadataIndex("x"): None}),
        lambda m: m.storage_data.update({MetadataIndex("x"): any_place(b"__0_0.distcp", 0, 1)}),
        lambda m: m.storage_data.update({MetadataIndex("x"): any_place("__0_0.distcp", 0.5, 1)}),
        lambda m: m.storage_data.update({MetadataIndex("x"): any_place("__0_0.distcp", 0, 10**5000)}),
    ],
)
def test_metadata_of_another_form_ends_in_a_report(megatron: Path, edit: Callable[[Any], object]) -> None:
    with edited(megatron) as metadata:
        edit(metadata)

    assert_problem(megatron, r"\.metadata has an unexpected form: .*")


def test_an_item_without_a_place(megatron: Path) -> None:
    with edited(megatron) as metadata:
        del metadata.storage_data[MetadataIndex(WEIGHT, torch.Size([ROWS, 0]))]
    assert_problem(megatron, rf"item 'model\.weight at offset \[{ROWS}, 0\]' has no place in any file")


def test_an_object_without_a_place(megatron: Path) -> None:
    with edited(megatron) as metadata:
        del metadata.storage_data[MetadataIndex("rng/shard_1_2")]
    assert_problem(megatron, "item 'rng/shard_1_2' has no place in any file")


def test_a_place_without_an_item(megatron: Path) -> None:
    with edited(megatron) as metadata:
        del metadata.state_dict_metadata["settings/shard_0_1"]
    pattern = r"__0_0\.distcp\[\d+:\d+\] is the place of item 'settings/shard_0_1', which the checkpoint does not have"
    assert_problem(megatron, pattern)


def test_two_items_in_one_place(megatron: Path) -> None:
    with edited(megatron) as metadata:
        first, second = place_of(metadata, "rng/shard_0_2"), place_of(metadata, "settings/shard_0_1")
        second.offset, second.length = first.offset, first.length
    start, end = first.offset, first.offset + first.length
    pattern = rf"in '__0_0\.distcp' item '(.*)' begins at byte {start}, but item '(.*)' ends at {end}"
    assert_problem(megatron, pattern)


def test_an_item_that_reaches_one_byte_into_the_next(megatron: Path) -> None:
    with edited(megatron) as metadata:
        places = [place for place in metadata.storage_data.values() if place.relative_path == "__0_0.distcp"]
        first = min(places, key=lambda place: place.offset)
        first.length += 1
    begin = first.length - 1
    pattern = rf"in '__0_0\.distcp' item '.*' begins at byte {begin}, but item '.*' ends at {first.length}"
    assert_problem(megatron, pattern)


def test_the_order_of_entries_does_not_matter(megatron: Path) -> None:
    with edited(megatron) as metadata:
        metadata.storage_data = dict(reversed(metadata.storage_data.items()))
    assert verify_checkpoint(megatron).complete


def test_one_file_under_two_names(megatron: Path) -> None:
    """Places in `x` and in `./x` are places in the same file."""
    with edited(megatron) as metadata:
        first, second = place_of(metadata, "rng/shard_0_2"), place_of(metadata, "settings/shard_0_1")
        second.relative_path, second.offset, second.length = f"./{first.relative_path}", first.offset, first.length
    assert_problem(megatron, r"in '__0_0\.distcp' item '.*' begins at byte .*")


@pytest.mark.parametrize("path", ["/etc/hostname", "../step_1/__0_0.distcp", "a/../../x", "a\\..\\..\\x", "", "a\0b"])
def test_a_path_that_leaves_the_directory(megatron: Path, path: str) -> None:
    with edited(megatron) as metadata:
        place_of(metadata, "rng/shard_1_2").relative_path = path

    assert_problem(megatron, r"item 'rng/shard_1_2' has no place inside: '.*', offset \d+, length \d+")


@pytest.mark.parametrize(("offset", "length"), [(-1, 10), (10, -1), (2**62, 2**62)])
def test_numbers_that_are_no_place(megatron: Path, offset: int, length: int) -> None:
    with edited(megatron) as metadata:
        place = place_of(metadata, "rng/shard_1_2")
        place.offset, place.length = offset, length

    problem = f"item 'rng/shard_1_2' has no place inside: '__1_0.distcp', offset {offset}, length {length}"
    assert_problem(megatron, problem)


def test_a_file_name_that_is_none(megatron: Path) -> None:
    with edited(megatron) as metadata:
        place_of(metadata, "rng/shard_1_2").relative_path = "\ud800"

    assert_problem(megatron, r"file '\\ud800', in which 1 items lie, cannot be read: Not a file name")


def test_a_missing_chunk(megatron: Path) -> None:
    with edited(megatron) as metadata:
        chunks_of(metadata, WEIGHT).pop(1)
        del metadata.storage_data[MetadataIndex(WEIGHT, torch.Size([ROWS, 0]))]
    pattern = rf"tensor 'model\.weight' is not covered exactly once: its element \[{ROWS}, 0\] lies in no chunk, .*"
    assert_problem(megatron, pattern)


def test_a_doubled_chunk(megatron: Path) -> None:
    with edited(megatron) as metadata:
        chunks_of(metadata, WEIGHT).append(chunks_of(metadata, WEIGHT)[0])
    pattern = r"tensor 'model\.weight' is not covered exactly once: its element \[0, 0\] lies in 2 chunks, .*"
    assert_problem(megatron, pattern)


def test_a_chunk_out_of_bounds(megatron: Path) -> None:
    with edited(megatron) as metadata:
        chunks_of(metadata, WEIGHT)[1].sizes = torch.Size([ROWS + 1, COLUMNS])
    pattern = r"tensor 'model\.weight' is not covered exactly once: its chunk \[5, 6\] at offset \[4, 0\] leaves .*"
    assert_problem(megatron, pattern)


def test_a_doubled_scalar(plain: Path) -> None:
    with edited(plain) as metadata:
        chunks_of(metadata, "step").append(chunks_of(metadata, "step")[0])
    assert_problem(plain, r"tensor 'step' is not covered exactly once: its element \[\] lies in 2 .*", kind="dcp")


def test_a_missing_empty_tensor(plain: Path) -> None:
    with edited(plain) as metadata:
        del metadata.storage_data[MetadataIndex("none", torch.Size([0, 0]))]
    assert_problem(plain, r"item 'none at offset \[0, 0\]' has no place in any file", kind="dcp")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_place_that_is_shifted_or_grown(plain: Path, data: st.DataObject) -> None:
    sound = (plain / ".metadata").read_bytes()
    with edited(plain) as metadata:
        place = data.draw(st.sampled_from(list(metadata.storage_data.values())))
        change = data.draw(st.integers(-(2**40), 2**40).filter(bool))
        if data.draw(st.booleans()):
            place.offset += change
        else:
            place.length += abs(change)

    report = verify_checkpoint(plain)

    (plain / ".metadata").write_bytes(sound)
    assert not report.complete
    assert verify_checkpoint(plain).complete


def test_a_long_list_of_problems_is_cut_and_counted(megatron: Path) -> None:
    with edited(megatron) as metadata:
        for number in range(100):
            metadata.state_dict_metadata[f"lost.{number:02}"] = BytesStorageMetadata()

    report = verify_checkpoint(megatron)

    assert report.problem_count == 100
    assert len(report.problems) == MOST_PROBLEMS == len(set(report.problems))
    assert report.reason == "item 'lost.00' has no place in any file (and 99 more)"
    assert not report.complete
