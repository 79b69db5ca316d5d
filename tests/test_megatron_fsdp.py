"""Jobs of Megatron-FSDP in Megatron's own training loop, with ``--ckpt-format fsdp_dtensor --async-save``."""

import importlib.metadata
from argparse import Namespace
from datetime import timedelta
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, save_costs
from megatron_fsdp_jobs import nvrx_of, run_fsdp_job
from nvrx_stand_ins import WITHOUT_NVRX
from ranks import RankPool
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_ckpt_ext import latest_complete_step
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.events import Phase, read_events
from megatron_ckpt_ext.integrations.fingerprint import files_per_rank, fingerprint_of
from megatron_ckpt_ext.integrations.fsdp_writer import ProbedWarmWriter
from megatron_ckpt_ext.integrations.observer import SaveObserver
from megatron_ckpt_ext.write.worker import WorkerSettings

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

    assert job.log.count(FALLBACK) == job.log.count("no process can be started here") == 1
    reasons = {event.reason for event in job.events if event.phase is Phase.FALLBACK}
    assert reasons == {"no writer process can be started (OSError: no process can be started here), on rank 1"}
    assert latest_complete_step(str(tmp_path / "checkpoints")).step == 4
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"
    metadata = FileSystemReader(tmp_path / "checkpoints" / "iter_0000004").read_metadata()
    assert {file.relative_path for file in metadata.storage_data.values()} == {"__0_0.distcp", "__1_0.distcp"}


def test_a_writer_that_cannot_start_is_tried_once_and_told_by_the_probe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def start(process: BaseProcess) -> None:
        tries.append(process.name)
        raise OSError("no more processes")

    warm = ProbedWarmWriter(timedelta(seconds=60))
    with monkeypatch.context() as patch:
        patch.setattr(SpawnProcess, "start", start)
        warm.start(WorkerSettings(rank=0), timedelta(seconds=60))
        problem = warm.probe()

    assert problem == "no writer process can be started (OSError: no more processes)"
    assert len(tries) == 1
    assert caplog.messages == []
    warm.start(WorkerSettings(rank=0), timedelta(seconds=60))
    assert warm.probe() == ""
    warm.close()


def test_a_rebuild_in_a_synchronous_save_is_an_event_of_that_save(tmp_path: Path) -> None:
    observer = SaveObserver(str(tmp_path / "events"), 0, lambda step: f"iter_{step}")
    observer.saving(7, lambda: observer.rebuilt("another shape"))
    observer.close()

    (rebuilt,) = [event for event in read_events(str(tmp_path / "events")) if event.phase is Phase.REBUILD]
    assert (rebuilt.step, rebuilt.reason) == (7, "another shape")


ARGUMENTS: dict[str, Any] = {
    "world_size": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "ckpt_format": "fsdp_dtensor",
    "use_distributed_optimizer": True,
    "dist_ckpt_optim_fully_reshardable": False,
    "use_gloo_process_groups": True,
    "async_save": True,
    "async_strategy": "nvrx",
    "save": "checkpoints",
}
"""What a session reads of Megatron's arguments, without those that a job may lack."""


@pytest.mark.parametrize(
    ("given", "files"),
    [
        ({}, 1),
        ({"dist_ckpt_workers": None}, 1),
        ({"dist_ckpt_workers": 3}, 1),
        ({"dist_ckpt_workers": 3, "ckpt_assume_constant_structure": True}, 3),
        ({"ckpt_format": "fsdp_dtensor"}, 1),
        ({"ckpt_format": "fsdp_dtensor", "dist_ckpt_workers": None}, 1),
        ({"ckpt_format": "fsdp_dtensor", "dist_ckpt_workers": 3}, 3),
    ],
    ids=str,
)
def test_the_files_of_a_rank_are_one_number_and_one_without_the_argument(given: dict[str, Any], files: int) -> None:
    args = Namespace(**{**ARGUMENTS, "ckpt_format": "torch_dist", **given})

    assert files_per_rank(args) == fingerprint_of(args).workers_per_rank == files


def started_twice_on_rank(given: dict[str, Any]) -> tuple[list[str | None], dict[str, Any]]:
    """Start a job that lacks arguments and a writer process, and start it again, as an in-process restart does."""
    from megatron.training import arguments, global_vars, training

    from megatron_ckpt_ext.integrations.megatron_lm import Installation

    stock, args, reasons = (training.initialize_megatron, arguments.validate_args), Namespace(**given), []
    before = global_vars._GLOBAL_ARGS
    training.initialize_megatron, arguments.validate_args = lambda: None, lambda args: args
    installation = Installation()
    try:
        global_vars._GLOBAL_ARGS = args
        arguments.validate_args(args)
        for _ in range(2):
            training.initialize_megatron()
            assert installation.session is not None
            reasons.append(installation.session.fallback)
    finally:
        installation.close()
        training.initialize_megatron, arguments.validate_args = stock
        global_vars._GLOBAL_ARGS = before
    return reasons, vars(args)


def test_a_job_may_lack_arguments_that_megatron_reads_in_its_saves(ranks: RankPool) -> None:
    ((_, args),) = ranks.run(started_twice_on_rank, ARGUMENTS, world_size=1)

    assert (args["dist_ckpt_workers"], args["enable_msc"]) == (1, False)
    assert args["async_save"] is False


def test_the_reason_for_synchronous_saves_outlives_an_in_process_restart(ranks: RankPool) -> None:
    ((reasons, _),) = ranks.run(started_twice_on_rank, ARGUMENTS, world_size=1)

    assert reasons == ["no writer process was started"] * 2


def refused_on_rank(nvrx: str) -> str:
    """Start a job that saves logits where NVRx is of a version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata.Distribution, "version", nvrx)
        try:
            started_twice_on_rank({**ARGUMENTS, "logits_save_dir": "logits"})
        except ConfigurationError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("nvrx", "reason"),
    [
        ("0.5.0", "nvidia-resiliency-ext 0.5.0 is installed, 0.6 or later is needed"),
        ("0.7.0", "no writer process was started"),
    ],
)
def test_logits_are_refused_where_saves_are_synchronous(ranks: RankPool, nvrx: str, reason: str) -> None:
    (sentence,) = ranks.run(refused_on_rank, nvrx, world_size=1)

    assert sentence == (
        "--logits-save-dir logits was given, but asynchronous saves, which write the logits, are not possible: "
        f"{reason}. Leave it out, or put that right"
    )
