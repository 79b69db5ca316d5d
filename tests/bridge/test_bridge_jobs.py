"""Megatron-Bridge's own pretraining on two CPU ranks, through the recipe's script and overrides."""

import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.bridge", reason="make bridge installs it")

from bridge.bridge_jobs import checkpoints, losses, run_bridge_job, steps
from jobs import ROOT, save_costs
from nvrx_stand_ins import NVRX_THAT_HAS_MOVED
from recipe_headers import commands

from megatron_ckpt_ext.publish.latest import latest_complete_step

pytestmark = pytest.mark.timeout(600)
OVERRIDES = ROOT / "recipes" / "bridge" / "overrides.yaml"
FORMATS = {"torch_dist": "tiny_gpt", "fsdp_dtensor": "tiny_gpt_megatron_fsdp"}


def creating(output: Path) -> tuple[str, str]:
    return f"checkpoint.ckpt_metadata={output / 'prepared'}", "checkpoint.ckpt_metadata_create=true"


@pytest.mark.parametrize("recipe", FORMATS.values(), ids=FORMATS)
def test_jobs_create_resume_and_reuse(recipe: str, tmp_path: Path) -> None:
    first = run_bridge_job("first", *creating(tmp_path), "train.train_iters=4", output=tmp_path, recipe=recipe)
    second = run_bridge_job("second", *creating(tmp_path), "train.train_iters=8", output=tmp_path, recipe=recipe)

    assert save_costs(first)[0].collectives.objects > 0
    assert [cost.step for cost in (*save_costs(first), *save_costs(second))] == [2, 4, 6, 8]
    assert [cost.collectives.objects for cost in save_costs(second)] == [0, 0]
    assert sorted(losses(second)) == [5, 6, 7, 8]
    assert steps(tmp_path) == [f"iter_{step:07}" for step in (2, 4, 6, 8)]
    assert (found := latest_complete_step(str(checkpoints(tmp_path)))) and found.step == 8


@pytest.mark.parametrize("recipe", FORMATS.values(), ids=FORMATS)
def test_synchronous_jobs_save_and_resume(recipe: str, tmp_path: Path) -> None:
    synchronous = "checkpoint.async_save=false"
    run_bridge_job("first", synchronous, "train.train_iters=2", output=tmp_path, recipe=recipe)
    second = run_bridge_job("second", synchronous, "train.train_iters=4", output=tmp_path, recipe=recipe)

    assert sorted(losses(second)) == [3, 4]
    assert steps(tmp_path) == ["iter_0000002", "iter_0000004"]


def test_the_command_above_the_overrides_trains(tmp_path: Path) -> None:
    (command,) = commands(OVERRIDES)
    words = [word.replace("$OUTPUT", str(tmp_path)) for word in command]
    given = words[words.index("recipes/bridge/pretrain.py") + 1 :]
    job = run_bridge_job("job", *given, "train.train_iters=4", "checkpoint.save_interval=2", output=tmp_path)

    assert save_costs(job)[0].collectives.objects > 0
    assert (tmp_path / "prepared.metadata").exists()


def test_bridge_alone_goes_on_from_our_checkpoint_and_with_the_same_losses(tmp_path: Path) -> None:
    ours, alone = tmp_path / "ours", tmp_path / "alone"
    ours.mkdir()
    alone.mkdir()
    run_bridge_job("first", *creating(ours), "train.train_iters=6", "train.exit_interval=4", output=ours)
    loaded = run_bridge_job("second", "train.train_iters=6", output=ours, kind="stock")
    whole = run_bridge_job("whole", "train.train_iters=6", "checkpoint.load=null", output=alone, kind="stock")

    assert sorted(losses(loaded)) == [5, 6]
    assert losses(loaded).items() <= losses(whole).items()
    assert "megatron_ckpt_ext" not in (checkpoints(ours) / "iter_0000004" / "run_config.yaml").read_text()


def test_what_runs_when_a_save_ends_is_told_its_step_and_the_newest_complete_one_stays(tmp_path: Path) -> None:
    settings = (*creating(tmp_path), "train.train_iters=6", "checkpoint.most_recent_k=1")
    job = run_bridge_job("job", *settings, output=tmp_path, kind="watched")

    told = [json.loads(line) for line in (job.folder / "notes").read_text().splitlines()]
    assert [note["told"] for note in told] == [2, 4, 6]
    assert ["iter_0000002" in note["published"] for note in told] == [True, True, False]
    assert steps(tmp_path) == ["iter_0000006"]


FALLBACK = "Checkpoints are saved synchronously, though asynchronous saves were asked for"


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ({"sitecustomize": NVRX_THAT_HAS_MOVED}, "nvidia-resiliency-ext has no FileSystemWriterAsync"),
        ({"kind": "no_writer"}, "no writer process can be started"),
    ],
    ids=["nvrx has moved", "no writer"],
)
def test_fsdp_dtensor_is_saved_synchronously_where_saves_cannot_be_asynchronous(
    lacking: dict[str, str], reason: str, tmp_path: Path
) -> None:
    settings = (*creating(tmp_path), "train.train_iters=4")
    job = run_bridge_job("job", *settings, output=tmp_path, recipe=FORMATS["fsdp_dtensor"], **lacking)

    assert job.log.count(f"{FALLBACK}: {reason}") == 1
    assert job.log.count(FALLBACK) == 1
    assert "scheduled an async checkpoint save" not in job.log
    assert steps(tmp_path) == ["iter_0000002", "iter_0000004"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("checkpoint.ckpt_metadata=/nowhere/prepared", "/nowhere/prepared"),
        ("checkpoint.ckpt_metadata_create=true", "checkpoint.ckpt_metadata_create"),
        ("checkpoint.ckpt_metadata_on_drift=maybe", "checkpoint.ckpt_metadata_on_drift"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(override: str, words: str, tmp_path: Path) -> None:
    job = run_bridge_job("job", override, "train.train_iters=2", output=tmp_path, exit_code=2)

    said = {line for line in job.log.splitlines() if line.startswith("megatron-ckpt: rank ")}
    assert {line.partition(": rank ")[2][0] for line in said} == {"0", "1"}
    assert len({line.partition(": rank ")[2][1:] for line in said}) == 1
    assert all(words in line and "--" not in line for line in said)
    assert not checkpoints(tmp_path).exists()
