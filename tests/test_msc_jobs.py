"""Megatron's own training loop with ``--enable-msc``: one job creates, one resumes and reuses, in a named profile."""

from pathlib import Path

import pytest
from jobs import run_job, save_costs
from msc_profiles import Profile

from megatron_ckpt_ext import latest_complete_step
from megatron_ckpt_ext.events import Phase

pytest_plugins = ["msc_profiles"]


@pytest.mark.timeout(300)
def test_a_job_saves_to_a_named_profile_and_another_resumes_from_it(files_profile: Profile, tmp_path: Path) -> None:
    url, file = files_profile.url("run"), tmp_path / "prepared.metadata"
    script = (
        *("--enable-msc", "--save", url, "--load", url, "--train-iters", "6", "--save-interval", "2"),
        *("--ckpt-metadata", str(file), "--ckpt-metadata-create"),
    )

    first = run_job(
        "first", (*script, "--exit-interval", "2", "--ckpt-events", events(tmp_path, "first")), output=tmp_path
    )
    again = run_job("again", (*script, "--ckpt-events", events(tmp_path, "again")), output=tmp_path)

    assert [cost.step for cost in save_costs(first) if cost.collectives.objects] == [2]
    assert [(cost.step, cost.collectives.objects) for cost in save_costs(again)] == [(4, 0), (6, 0)]
    assert [event.reason for event in again.events if event.phase in (Phase.REBUILD, Phase.FALLBACK)] == []
    assert f"successfully loaded checkpoint from {url}" in (tmp_path / "again" / "log").read_text()
    for step in (2, 4, 6):
        saved = files_profile.plain / "run" / f"iter_{step:07d}"
        data = {f"__{rank}_0.distcp" for rank in (0, 1)}
        assert {path.name for path in saved.iterdir()} == data | {".complete", ".metadata", "metadata.json"}
    found = latest_complete_step(url)
    assert (found.step, found.path, found.skipped) == (6, f"{url}/iter_0000006", ())
    assert (files_profile.plain / "run" / "latest_checkpointed_iteration.txt").read_text() == "6"


def events(folder: Path, name: str) -> str:
    return str(folder / name / "events")
