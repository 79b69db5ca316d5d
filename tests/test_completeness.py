"""Checkpoints of real writers are judged complete; with a damaged file they are not, and the reason is named."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from made_checkpoints import RANKS, assert_problem, chunks_of, edited
from prepared_files import crafted_bytes
from ranks import RankPool
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from workload import COMMON

from megatron_ckpt_ext import verify_checkpoint

pytest_plugins = ["made_checkpoints"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

type Damage = Callable[[Path], object]


def save_sharded_on_rank(directory: str) -> None:
    """Save tensors in shards of 2, 2 and 0 rows, and of columns, as FSDP does; the object stays the same on all."""
    mesh = init_device_mesh("cpu", (3,))
    rows = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    columns = distribute_tensor(torch.arange(20.0).view(4, 5), mesh, [Shard(1)])
    save({"rows": rows, "columns": columns, "settings": "x"}, checkpoint_id=directory)


def cut(file: Path, byte_count: int = 1) -> None:
    """Take bytes off the end."""
    os.truncate(file, file.stat().st_size - byte_count)


# Sound checkpoints


def test_checkpoints_of_our_strategy_are_complete(made: Path) -> None:
    for step in (1, 2):
        report = verify_checkpoint(made / f"step_{step}")

        assert (report.problems, report.complete, report.reason) == ((), True, "")
        assert (report.kind, report.files) == ("torch_dist", RANKS)
        # Two sharded and two replicated tensors, two objects of each rank or replicated, and the common state.
        assert report.items == 2 * RANKS + 2 + RANKS + 1 + len(COMMON)
        data = [file.stat().st_size for file in (made / f"step_{step}").glob("*.distcp")]
        assert report.bytes == sum(data)


def test_a_plain_checkpoint_is_complete_without_side_files(plain: Path) -> None:
    report = verify_checkpoint(plain)

    assert report.problems == ()
    assert (report.kind, report.items, report.files) == ("dcp", 4, 1)


def test_a_checkpoint_of_uneven_shards_is_complete(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_sharded_on_rank, str(tmp_path / "sharded"), world_size=3)

    report = verify_checkpoint(str(tmp_path / "sharded"))

    with edited(tmp_path / "sharded") as metadata:
        assert [chunk.sizes[0] for chunk in chunks_of(metadata, "rows")] == [2, 2, 0]
        assert [chunk.sizes[1] for chunk in chunks_of(metadata, "columns")] == [2, 2, 1]
    assert report.problems == ()
    assert report.kind == "dcp"
    assert report.path == str(tmp_path / "sharded")


def test_a_prepared_file_as_metadata_is_complete(made: Path, megatron: Path) -> None:
    shutil.copy(made / "prepared.metadata", megatron / ".metadata")

    assert verify_checkpoint(megatron).problems == ()


def test_what_else_lies_in_the_directory_does_not_matter(megatron: Path) -> None:
    (megatron / ".metadata.0123456789ab.tmp").write_bytes(b"left over")
    (megatron / "__9_0.distcp").write_bytes(b"of an older, larger job")
    (megatron / "modelopt_state").mkdir()

    assert verify_checkpoint(megatron).complete


def test_a_checkpoint_before_megatron_0_19_has_its_common_state_in_a_file(megatron: Path) -> None:
    with edited(megatron) as metadata:
        metadata.state_dict_metadata.pop("common_state/shard_0_1", None)
        metadata.storage_data.pop(MetadataIndex("common_state/shard_0_1"), None)
    (megatron / "common.pt").unlink(missing_ok=True)
    assert_problem(megatron, r"common\.pt, needed since .* 'common_state', cannot be read: No such file or directory")

    torch.save({"iteration": 7}, megatron / "common.pt")
    assert verify_checkpoint(megatron).complete

    cut(megatron / "common.pt")
    assert_problem(megatron, r"common\.pt is cut off or damaged: .*")


# Damaged `.metadata`


def empty_directory(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def temporary_files_only(directory: Path) -> None:
    (directory / ".metadata").rename(directory / ".metadata.0123456789ab.tmp")
    for file in directory.glob("[!.]*"):
        file.unlink()


def no_directory(directory: Path) -> None:
    shutil.rmtree(directory)


def a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_bytes(b"")


def metadata_is(data: bytes) -> Damage:
    return lambda directory: (directory / ".metadata").write_bytes(data)


def metadata_replaced_by(make: Callable[[Path], object]) -> Damage:
    def damage(directory: Path) -> None:
        (directory / ".metadata").unlink()
        make(directory / ".metadata")

    return damage


def bit_flipped(directory: Path) -> None:
    """In the first opcode of the pickle: protocol 5 instead of 4 would still load."""
    data = bytearray((directory / ".metadata").read_bytes())
    data[0] ^= 1
    (directory / ".metadata").write_bytes(data)


MISSING = r"\.metadata is missing: no save was finished in this directory"
DAMAGED = r"\.metadata is damaged, it cannot be read as a pickled Metadata: .*"


@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (empty_directory, MISSING),
        (temporary_files_only, MISSING),
        (no_directory, r".*step_2' is no directory"),
        (a_file, r".*step_2' is no directory"),
        (lambda directory: cut(directory / ".metadata"), DAMAGED),
        (metadata_is(b""), DAMAGED),
        (metadata_is(bytes(4096)), DAMAGED),
        (bit_flipped, DAMAGED),
        (metadata_is(pickle.dumps({"a": 1})), r"\.metadata holds a dict, not a checkpoint's Metadata"),
        (metadata_replaced_by(Path.mkdir), r"\.metadata cannot be read: Not a regular file"),
        (metadata_replaced_by(os.mkfifo), r"\.metadata cannot be read: Not a regular file"),
        (metadata_replaced_by(lambda file: file.symlink_to("nowhere")), MISSING),
    ],
)
def test_a_checkpoint_without_readable_metadata(megatron: Path, damage: Damage, pattern: str) -> None:
    damage(megatron)

    report = verify_checkpoint(megatron)

    assert re.fullmatch(pattern, report.reason), report.reason
    assert not report.complete
    assert (report.items, report.bytes, report.files) == (0, 0, 0)


def test_a_damaged_trailer_is_no_reason_to_remove_anything(made: Path, megatron: Path) -> None:
    data = bytearray((made / "prepared.metadata").read_bytes())
    data[len(data) - 20] ^= 1
    (megatron / ".metadata").write_bytes(data)

    assert_problem(megatron, r"\.metadata cannot be read, or the trailer behind it is damaged")


@dataclass
class Hostile:
    """Pickles to a call."""

    witness: str

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.witness}",)


@pytest.mark.parametrize("trailer", [False, True])
def test_foreign_code_is_not_run(megatron: Path, tmp_path: Path, trailer: bool) -> None:
    data = pickle.dumps(Hostile(str(tmp_path / "witness")))
    if trailer:
        data = crafted_bytes(sections=[{}], body=data[:-1])
    (megatron / ".metadata").write_bytes(data)

    assert_problem(megatron, r"\.metadata: it refers to posix\.system, which no checkpoint metadata needs; .*")
    assert not (tmp_path / "witness").exists()


# Damaged data files


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_file_cut_by_one_byte(megatron: Path, rank: int) -> None:
    file = megatron / f"__{rank}_0.distcp"
    size = file.stat().st_size

    cut(file)

    pattern = rf"file '__{rank}_0\.distcp' has {size - 1} bytes, but 1 items reach beyond, item '.*' to byte {size}"
    assert_problem(megatron, pattern)


def test_an_empty_file(megatron: Path) -> None:
    size = (megatron / "__0_0.distcp").stat().st_size
    os.truncate(megatron / "__0_0.distcp", 0)

    assert_problem(megatron, rf"file '__0_0\.distcp' has 0 bytes, but \d+ items reach beyond, item '.*' to byte {size}")


@pytest.mark.parametrize(
    ("replacement", "why"),
    [
        (lambda file: None, "No such file or directory"),
        (Path.mkdir, "Not a regular file"),
        (os.mkfifo, "Not a regular file"),
        (lambda file: file.symlink_to(file), "Too many levels of symbolic links"),
    ],
)
def test_a_file_that_is_missing(megatron: Path, replacement: Callable[[Path], object], why: str) -> None:
    (megatron / "__1_0.distcp").unlink()
    replacement(megatron / "__1_0.distcp")

    assert_problem(megatron, rf"file '__1_0\.distcp', in which \d+ items lie, cannot be read: {why}")


# Side files


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (None, "metadata.json, which Megatron needs beside .metadata, cannot be read: No such file or directory"),
        (b"", r"metadata\.json is no JSON: .*"),
        (b'{"sharded_backend": "torch_di', r"metadata\.json is no JSON: .*"),
        (b"\xff\xfe", r"metadata\.json is no JSON: .*"),
        (b"[" * 100_000, r"metadata\.json is no JSON: .*"),
        (b'["torch_dist"]', r"metadata\.json names the format \['torch_dist'\], not 'torch_dist'"),
        (b'{"sharded_backend": "zarr"}', r"metadata\.json names the format 'zarr', not 'torch_dist'"),
        (b"{}", r"metadata\.json names the format None, not 'torch_dist'"),
    ],
)
def test_the_config_of_megatron_must_be_there(megatron: Path, content: bytes | None, pattern: str) -> None:
    """Megatron is recognised by its objects, too, so a missing file is no plain checkpoint."""
    (megatron / "metadata.json").unlink()
    if content is not None:
        (megatron / "metadata.json").write_bytes(content)

    assert_problem(megatron, pattern)


def test_a_config_makes_a_checkpoint_one_of_megatron(plain: Path) -> None:
    (plain / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))

    assert_problem(plain, r"common\.pt, needed since .*")


def test_a_common_file_makes_a_checkpoint_one_of_megatron(plain: Path) -> None:
    torch.save({}, plain / "common.pt")

    assert_problem(plain, r"metadata\.json, which Megatron needs .*")


def test_nothing_is_written_and_no_process_group_is_needed(megatron: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in [megatron, *megatron.iterdir()]}

    assert not torch.distributed.is_initialized()
    verify_checkpoint(megatron)

    assert {file: file.stat().st_mtime_ns for file in [megatron, *megatron.iterdir()]} == before
