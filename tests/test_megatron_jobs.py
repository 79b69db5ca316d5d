"""Two jobs of Megatron's own training loop: one creates, one resumes and reuses; seen from outside."""

import pickle
from pathlib import Path

import pytest
from jobs import run_job, save_costs
from torch.distributed.checkpoint.metadata import Metadata

from megatron_ckpt_ext import latest_complete_step
from megatron_ckpt_ext.events import Phase


@pytest.mark.timeout(300)
def test_a_resumed_job_saves_without_object_collectives(tmp_path: Path) -> None:
    save, file = str(tmp_path / "checkpoints"), tmp_path / "prepared.metadata"
    common = (
        "--train-iters",
        "10",
        "--save-interval",
        "2",
        "--load",
        save,
        "--save",
        save,
        "--ckpt-metadata",
        str(file),
    )
    script = (*common, "--ckpt-metadata-create")

    first = run_job(
        "first", (*script, "--exit-interval", "6", "--ckpt-events", events(tmp_path, "first")), output=tmp_path
    )
    made = file.read_bytes()
    again = run_job("again", (*script, "--ckpt-events", events(tmp_path, "again")), output=tmp_path)

    created, *reused = save_costs(first)
    assert created.collectives.objects > 0
    assert reused[-1].collectives.objects == 0  # the save before may have been planned while the first was written
    assert [cost.collectives.objects for cost in save_costs(again)] == [0, 0]
    assert [event.reason for event in again.events if event.phase in (Phase.REBUILD, Phase.FALLBACK)] == []
    assert file.read_bytes() == made
    assert "not there yet" in (tmp_path / "first" / "log").read_text()
    assert (tmp_path / "again" / "log").read_text().count("saves reuse") == 1

    assert latest_complete_step(save).step == 10
    published = [pickle.loads((Path(save) / f"iter_{step:07d}" / ".metadata").read_bytes()) for step in (6, 10)]
    assert all(isinstance(metadata, Metadata) for metadata in published)
    assert published[0].storage_data == published[1].storage_data
    assert published[1].storage_meta.checkpoint_id.endswith("iter_0000010")


def events(folder: Path, name: str) -> str:
    return str(folder / name / "events")
