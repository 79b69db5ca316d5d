"""With the flags unset the extension changes nothing: the checkpoints are the same to the byte, ids apart."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import run_job
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta


@pytest.mark.timeout(240)
def test_a_checkpoint_is_the_same_with_and_without_the_extension(tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    arguments = ("--train-iters", "2", "--save-interval", "2", "--save", str(save), "--ckpt-assume-constant-structure")
    for name, stock in (("without", True), ("with", False)):
        run_job(name, arguments, output=tmp_path, stock=stock)
        save.rename(tmp_path / f"{name} checkpoints")

    without, with_it = (files_of(tmp_path / f"{name} checkpoints") for name in ("without", "with"))
    assert without.keys() == with_it.keys()
    assert len(without) == 5
    assert [name for name in without if without[name] != with_it[name]] == []


def files_of(directory: Path) -> dict[str, bytes | Metadata]:
    """Every file by its name; metadata without the ids that are new in each save."""
    found: dict[str, bytes | Metadata] = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        data = path.read_bytes()
        found[str(path.relative_to(directory))] = without_ids(data) if path.name == ".metadata" else data
    return found


def without_ids(data: bytes) -> Metadata:
    metadata: Metadata = pickle.loads(data)
    assert isinstance(metadata.storage_meta, StorageMeta)
    return replace(metadata, storage_meta=None)
