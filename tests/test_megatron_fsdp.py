"""Jobs of Megatron-FSDP in Megatron's own training loop, with ``--ckpt-format fsdp_dtensor --async-save``."""

from pathlib import Path

import pytest
from jobs import Job, save_costs
from megatron_fsdp_jobs import nvrx_of, run_fsdp_job
from nvrx_stand_ins import WITHOUT_NVRX
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_ckpt_ext import latest_complete_step
from megatron_ckpt_ext.events import Phase, read_events
from megatron_ckpt_ext.integrations.observer import SaveObserver

pytestmark = pytest.mark.timeout(300)

SWIGLU = "--swiglu"
"""Megatron splits some weights for the save, with gathers of its own."""
FALLBACK = "Checkpoints are saved synchronously, though asynchronous saves were asked for"


@pytest.fixture(scope="module")
def without_nvrx(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Saves at 4 and 8, never interrupted."""
    output = tmp_path_factory.mktemp("without_nvrx")
    options = ("--log-progress", "--ckpt-metadata", str(output / "prepared"), "--ckpt-metadata-create")
    return run_fsdp_job("job", (SWIGLU, *options), output=output, sitecustomize=WITHOUT_NVRX)


def test_without_the_extension_the_ranks_wait_for_each_other_forever(tmp_path: Path) -> None:
    job = run_fsdp_job("stock", (), output=tmp_path, kind="stock", exit_code=1)

    stacks = job.log.split("Timeout (")[1:]
    assert [stack for stack in stacks if "in gather_and_compute_chunk_metadata" in stack] != []
    assert latest_complete_step(str(tmp_path / "checkpoints")).step is None


def test_a_resumed_job_trains_on_as_if_nothing_was_and_saves_without_object_collectives(
    tmp_path: Path, without_nvrx: Job
) -> None:
    metadata = ("--ckpt-metadata", str(tmp_path / "prepared"), "--ckpt-metadata-create")
    first = run_fsdp_job("first", (SWIGLU, *metadata, "--exit-interval", "4"), output=tmp_path)
    made = (tmp_path / "prepared").read_bytes()
    load = ("--load", str(tmp_path / "checkpoints"), "--save-interval", "2", "--async-strategy", "mcore")
    again = run_fsdp_job("again", (SWIGLU, *metadata, *load), output=tmp_path)

    assert [cost.collectives.objects > 0 for cost in save_costs(first)] == [True]
    assert [cost.collectives.objects for cost in save_costs(again)] == [0, 0]
    assert [event.reason for event in again.events if event.phase is Phase.REBUILD] == []
    assert {event.step for event in again.events if event.phase is Phase.STAGE} == {6, 8}
    assert (tmp_path / "prepared").read_bytes() == made
    assert first.losses | again.losses == without_nvrx.losses
    assert sorted(again.losses) == [5, 6, 7, 8]
    assert [(rank["loaded"] != [], rank["error"]) for rank in nvrx_of(again)] == [(True, "")] * 2
    assert latest_complete_step(str(tmp_path / "checkpoints")).step == 8


def test_without_nvrx_saves_are_synchronous_and_published_with_one_warning(without_nvrx: Job) -> None:
    folder = without_nvrx.folder.parent / "checkpoints"

    assert without_nvrx.log.count(FALLBACK) == 1
    assert "saves are stock" not in without_nvrx.log
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "8"
    assert latest_complete_step(str(folder)).step == 8
    assert sorted(path.name for path in (folder / "iter_0000008").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    ]
    fell_back = [event for event in without_nvrx.events if event.phase is Phase.FALLBACK and event.rank == 0]
    assert {event.reason for event in fell_back} == {"nvidia-resiliency-ext is not installed"}
    assert [cost.collectives.objects > 0 for cost in save_costs(without_nvrx)] == [True, False]
    progress = (folder / "progress.txt").read_text()
    assert progress.count("Saved checkpoint\tIteration: 8") == 1
    assert "async" not in progress


def test_nothing_of_nvrx_can_be_imported_there(without_nvrx: Job) -> None:
    for rank in nvrx_of(without_nvrx):
        assert rank["loaded"] == []
        assert rank["error"].startswith("ModuleNotFoundError: ")
    assert len(nvrx_of(without_nvrx)) == 2


def test_one_writer_that_cannot_start_makes_all_saves_synchronous(tmp_path: Path) -> None:
    job = run_fsdp_job("job", ("--exit-interval", "4"), output=tmp_path, kind="no_writer")

    assert job.log.count(FALLBACK) == 1
    reasons = {event.reason for event in job.events if event.phase is Phase.FALLBACK}
    assert reasons == {"no writer process can be started (OSError: no process can be started here), on rank 1"}
    assert latest_complete_step(str(tmp_path / "checkpoints")).step == 4
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"
    metadata = FileSystemReader(tmp_path / "checkpoints" / "iter_0000004").read_metadata()
    assert {file.relative_path for file in metadata.storage_data.values()} == {"__0_0.distcp", "__1_0.distcp"}


def test_a_rebuild_in_a_synchronous_save_is_an_event_of_that_save(tmp_path: Path) -> None:
    observer = SaveObserver(str(tmp_path / "events"), 0, lambda step: f"iter_{step}")
    observer.saving(7, lambda: observer.rebuilt("another shape"))
    observer.close()

    (rebuilt,) = [event for event in read_events(str(tmp_path / "events")) if event.phase is Phase.REBUILD]
    assert (rebuilt.step, rebuilt.reason) == (7, "another shape")
