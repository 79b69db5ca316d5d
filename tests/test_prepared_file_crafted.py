"""Prepared files that somebody made up: nothing in them is run, and nothing in them is believed."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prepared_files import crafted_bytes, layout, slice_of, written
from torch.distributed.checkpoint.metadata import Metadata

from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.layout import Slice
from megatron_ckpt_ext.metadata.pickled import metadata_body, with_storage_meta
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata

PLAIN = with_storage_meta(None)


class _RunsCommand:
    """Pickles to a call of ``os.system``."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        from os import system

        return system, (self.command,)


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

    loaded = PreparedMetadata.load(path, rank, 2)

    if rank == 0:  # it would publish the pickle with every checkpoint
        with pytest.raises(PreparedFileError, match="refers to posix.system, which no checkpoint metadata needs"):
            loaded.in_memory()
    else:
        assert loaded.body is None

    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("change", ["moved", "outside", "added", "unknown_rank"])
def test_a_layout_that_says_otherwise_than_the_sections_is_refused(tmp_path: Path, change: str) -> None:
    """The ranks compare with their sections only, so nobody would ever see it."""
    metadata = layout(2)
    sections = [slice_of(metadata, rank).to_json() for rank in range(2)]
    index, info = next(iter(metadata.storage_data.items()))
    if change == "moved":
        metadata.storage_data[index] = replace(info, offset=info.offset + 64)
    elif change == "outside":
        metadata.storage_data[index] = replace(info, relative_path=f"../../{info.relative_path}")
    elif change == "added":
        metadata.storage_data[replace(index, fqn="added")] = info
    else:
        metadata.storage_data[index] = replace(info, relative_path="__7_0.distcp")
    path = written(tmp_path / "prepared", crafted_bytes(body=metadata_body(metadata), suffix=PLAIN, sections=sections))

    loaded = PreparedMetadata.load(path, 0, 2)
    with pytest.raises(PreparedFileError):
        loaded.in_memory()


def test_a_section_may_say_more_than_the_layout(tmp_path: Path) -> None:
    """Of two ranks that wrote one item the layout names one."""
    metadata = layout(2)
    sections = [slice_of(metadata, rank).to_json() for rank in range(2)]
    sections[1]["locators"].append([*sections[0]["locators"][0][:2], "__1_0.distcp", 1 << 20, 8])
    path = written(tmp_path / "prepared", crafted_bytes(body=metadata_body(metadata), suffix=PLAIN, sections=sections))

    assert isinstance(PreparedMetadata.load(path, 0, 2).in_memory().body, bytes)


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
@pytest.mark.parametrize("file", ["../__1_0.distcp", "/etc/__1_0.distcp", "model-00001.distcp", "__x_0.distcp", ""])
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
