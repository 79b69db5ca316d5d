"""Jobs of Megatron-FSDP with an NVRx that lacks what is needed, or that cannot be imported, as the machine tells it."""

from pathlib import Path

import pytest
from jobs import FSDP_RECIPE, JobFailedError
from megatron_fsdp_jobs import nvrx_of, run_fsdp_job
from nvrx_stand_ins import NVRX_THAT_HAS_MOVED, WITH_BROKEN_NVRX, nvrx_of_version

from megatron_ckpt_ext import latest_complete_step
from megatron_ckpt_ext.events import Phase

FALLBACK = "Checkpoints are saved synchronously, though asynchronous saves were asked for"


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (
            NVRX_THAT_HAS_MOVED,
            "nvidia-resiliency-ext has no FileSystemWriterAsync.register_shm_drain_callback",
        ),
        (
            WITH_BROKEN_NVRX,
            "nvidia-resiliency-ext cannot be imported (ModuleNotFoundError: "
            "No module named 'nvidia_resiliency_ext.checkpointing'; 'nvidia_resiliency_ext' is not a package)",
        ),
    ],
    ids=["has_moved", "cannot_be_imported"],
)
def test_a_job_saves_synchronously_and_says_why(tmp_path: Path, machine: str, reason: str) -> None:
    job = run_fsdp_job("job", ("--exit-interval", "4"), output=tmp_path, sitecustomize=machine)

    folder = tmp_path / "checkpoints"
    assert job.log.count(f"{FALLBACK}: {reason}.") == 1
    assert job.log.count(FALLBACK) == 1
    assert {event.reason for event in job.events if event.phase is Phase.FALLBACK} == {reason}
    assert {event.phase for event in job.events} == {Phase.PLAN, Phase.FALLBACK}
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert latest_complete_step(str(folder)).step == 4
    if machine is WITH_BROKEN_NVRX:
        assert [rank["loaded"] for rank in nvrx_of(job)] == [[], []]


def test_the_launcher_refuses_an_nvrx_that_megatron_would_die_of(tmp_path: Path) -> None:
    job = run_fsdp_job("job", (), output=tmp_path, sitecustomize=nvrx_of_version("0.5.0"), exit_code=2)

    assert "nvidia-resiliency-ext 0.5.0 is installed, but megatron-core" in job.log
    assert "install nvidia-resiliency-ext>=0.6.0 or uninstall it" in job.log
    assert not (tmp_path / "checkpoints").exists()
    assert not job.dump.exists()


def test_a_job_that_ends_otherwise_than_expected_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match="ended with exit code 2, not 0; (.|\n)*0.5.0 is installed"):
        run_fsdp_job("job", (), output=tmp_path, recipe=FSDP_RECIPE, sitecustomize=nvrx_of_version("0.5.0"))
