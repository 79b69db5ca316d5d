"""Checkpoints of real writers, and helpers to damage them and to look at the judgement.

A plug-in of pytest, for its fixtures; test modules import it before pytest does, so PYTEST_DONT_REWRITE its asserts.
"""

import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save
from workload import Job, save_series_on_rank

from megatron_ckpt_ext import verify_checkpoint

RANKS = 2
"""Of the job that made the `torch_dist` checkpoints."""


@pytest.fixture(scope="session")
def made(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`step_1` and `step_2` of our strategy on two ranks, and the prepared file beside them."""
    directory = tmp_path_factory.mktemp("made")
    job = Job(directory=str(directory), create=str(directory / "prepared.metadata"))
    ranks.run(save_series_on_rank, job, [1, 2], world_size=RANKS)
    return directory


@pytest.fixture
def megatron(made: Path, tmp_path: Path) -> Path:
    """A `torch_dist` checkpoint of two ranks, to damage."""
    return Path(shutil.copytree(made / "step_2", tmp_path / "step_2"))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A checkpoint of plain torch, one process, to damage."""
    directory = tmp_path / "plain"
    state = {"weight": torch.ones(3, 4), "step": torch.tensor(7), "none": torch.empty(0, 4), "lr": 0.25}
    save(state, checkpoint_id=directory, no_dist=True)
    return directory


@contextmanager
def edited(directory: Path) -> Iterator[Metadata]:
    """Change what a checkpoint's `.metadata` says."""
    file = directory / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    yield metadata
    file.write_bytes(pickle.dumps(metadata))


def place_of(metadata: Metadata, name: str, offset: list[int] | None = None) -> Any:
    return metadata.storage_data[MetadataIndex(name, None if offset is None else torch.Size(offset))]


def chunks_of(metadata: Metadata, name: str) -> list[ChunkStorageMetadata]:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry.chunks


def assert_problem(directory: Path, pattern: str, *, kind: str = "torch_dist") -> None:
    """The damage is the only problem, and is named like this."""
    report = verify_checkpoint(directory)
    assert re.fullmatch(pattern, "\n".join(report.problems)), report.problems
    assert not report.complete
    assert report.kind == kind
