"""Starting training jobs through ``megatron-ckpt run`` and reading what they printed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import yaml
from packaging.version import Version

from megatron_ckpt_ext.collectives import CollectiveSums
from megatron_ckpt_ext.events import Event, Phase, read_events

__all__ = [
    "FSDP_RECIPE",
    "RECIPE",
    "ROOT",
    "SAVING",
    "STATE_DUMP",
    "Job",
    "JobFailedError",
    "Launch",
    "SaveCost",
    "megatron_version",
    "on_this_machine",
    "run_job",
    "save_costs",
    "training_script",
    "unknown_flags",
]

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "cpu_laptop.yaml"
FSDP_RECIPE = ROOT / "recipes" / "cpu_fsdp_dtensor.yaml"
STATE_DUMP = ROOT / "functional_tests" / "state_dump.py"

SAVING = ("--save", "--load", "--save-interval", "--async-save", "--use-persistent-ckpt-worker")
"""Flags without which Megatron saves nothing and starts from nothing."""

type Launch = Callable[[Sequence[str], int, Mapping[str, str], Path, float], int | str]
"""Runs ``megatron-ckpt run`` with these words on so many ranks in this environment, with a log, for so many seconds at
most; returns the exit code, or says why there is none."""


class JobFailedError(Exception):
    """A job that did not end with the exit code that was expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A finished job."""

    name: str
    """Its name."""
    folder: Path
    """Its log, dumps and events."""

    @property
    def dump(self) -> Path:
        """Where its ranks kept what they saved."""
        return self.folder / "dump"

    @property
    def log(self) -> str:
        """What the launcher and every rank printed."""
        return (self.folder / "log").read_text(errors="replace")

    @property
    def losses(self) -> dict[int, float]:
        """Iteration -> loss of the last rank, exactly."""
        lines = max(self.dump.glob("losses.*")).read_text().splitlines()
        return {step: float.fromhex(losses["lm loss"]) for step, losses in map(json.loads, lines)}

    @property
    def events(self) -> list[Event]:
        """Its events, of every rank."""
        return read_events(str(self.folder / "events"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCost:
    """What one save cost the training thread; collectives of rank 0, time of the slowest rank."""

    step: int
    """Iteration that was saved."""
    collectives: CollectiveSums
    """Over all phases."""
    blocking_ms: float
    """Milliseconds that the training thread spent in it."""


def run_job(
    name: str,
    arguments: Sequence[str],
    *,
    output: Path,
    recipe: Path | None = RECIPE,
    without: Collection[str] = (),
    script: Path = STATE_DUMP,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    sitecustomize: str = "",
    emulated: bool = True,
    stock: bool = False,
    exit_code: int = 0,
    timeout: float = 180.0,
    launch: Launch | None = None,
) -> Job:
    """Run a recipe with more arguments, or a script with its arguments alone, to its end.

    Args:
        name: also the name of its folder in ``output``.
        arguments: behind those of the recipe.
        output: folder of all jobs.
        recipe: of the job; ``None`` for a script that takes none.
        without: flags of the recipe to leave out.
        script: what each rank runs; it finds the training script in ``STATE_DUMP_SCRIPT``.
        ranks: CPU ranks.
        environment: variables to set beside those of every job.
        sitecustomize: Python source that runs first in every process of the job, the launcher included.
        emulated: let CUDA names act on the CPU, as Megatron needs it.
        stock: run with every replaced name put back.
        exit_code: with which the job must end.
        timeout: in seconds.
        launch: how; with torchrun on this machine where none is given.

    Raises:
        JobFailedError: with the end of the log.
    """
    folder = output / name
    folder.mkdir()
    path = [str(ROOT), str(ROOT / "functional_tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    if sitecustomize:
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(sitecustomize)
        path.insert(0, str(folder / "site"))
    words = ["--cpu"] if emulated else []
    if recipe is not None:
        if dropped := {*without, *unknown_flags()}:
            recipe = _shortened(recipe, dropped, folder / "recipe.yaml")
        words += ["--recipe", str(recipe)]
    words += [str(script), *arguments]
    variables = {
        "OUTPUT": str(output),
        "PYTHONPATH": os.pathsep.join(path),
        "STATE_DUMP_FOLDER": str(folder / "dump"),
        "STATE_DUMP_SCRIPT": str(training_script()),
        "STATE_DUMP_STOCK": "1" if stock else "",
    }
    job = Job(name=name, folder=folder)
    whole = {**os.environ, **variables, **(environment or {})}
    code = (launch or on_this_machine)(words, ranks, whole, folder / "log", timeout)
    if code != exit_code:
        raise JobFailedError(
            f"job {name} ended with exit code {code}, not {exit_code}; the end of its log:\n{job.log[-4000:]}"
        )
    return job


def training_script() -> Path:
    """Return the script that trains with the installed Megatron."""
    if megatron_version() < Version("0.19"):
        return ROOT / "functional_tests" / "pretrain_gpt_before_0_19.py"
    return ROOT / "recipes" / "pretrain_gpt.py"


def unknown_flags() -> tuple[str, ...]:
    """Return flags of the recipes for the CPU that the installed Megatron does not have."""
    return ("--async-ckpt-use-cpu-shm",) if megatron_version() < Version("0.18") else ()


def megatron_version() -> Version:
    """Return the installed version of megatron-core."""
    return Version(version("megatron-core"))


def _shortened(recipe: Path, without: Collection[str], target: Path) -> Path:
    """Write a recipe anew without some of its flags."""
    document = yaml.safe_load(recipe.read_text())
    kept = {flag: value for flag, value in document["MODEL_ARGS"].items() if flag not in without}
    target.write_text(yaml.safe_dump({"ENV_VARS": document.get("ENV_VARS"), "MODEL_ARGS": kept}, sort_keys=False))
    return target


def on_this_machine(
    words: Sequence[str], ranks: int, environment: Mapping[str, str], log: Path, timeout: float
) -> int | str:
    """Start all ranks here, and kill the whole session when the time is over. This is a ``Launch``."""
    command = [sys.executable, "-m", "megatron_ckpt_ext.cli.main", "run", "--nproc", str(ranks), *words]
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"none within {timeout:g} s"


def save_costs(job: Job) -> list[SaveCost]:
    """Sum the events of a job by save, in order."""
    blocking = [event for event in job.events if event.phase in (Phase.PLAN, Phase.STAGE, Phase.COMMIT)]
    costs = []
    for step in sorted({event.step for event in blocking}):
        ours = [event for event in blocking if event.step == step]
        seconds = {rank: sum(event.seconds for event in ours if event.rank == rank) for rank in {e.rank for e in ours}}
        costs.append(
            SaveCost(
                step=step,
                collectives=CollectiveSums.of(*(event.collectives for event in ours if event.rank == 0)),
                blocking_ms=1000 * max(seconds.values()),
            )
        )
    return costs
