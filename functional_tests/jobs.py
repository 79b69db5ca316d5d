"""Starting training jobs through ``megatron-ckpt run`` and reading what they printed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ckpt_ext.collectives import CollectiveSums
from megatron_ckpt_ext.events import Event, Phase, read_events

__all__ = ["Job", "JobFailedError", "SaveCost", "run_job", "save_costs"]

ROOT = Path(__file__).resolve().parent.parent


class JobFailedError(Exception):
    """A job that ended with another exit code than 0."""


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
    name: str, arguments: Sequence[str], *, output: Path, ranks: int = 2, stock: bool = False, timeout: float = 180.0
) -> Job:
    """Run the recipe of a laptop with more arguments, to its end.

    Args:
        name: also the name of its folder in ``output``.
        arguments: behind those of the recipe.
        output: folder of all jobs.
        ranks: CPU ranks.
        stock: run with every replaced name put back.
        timeout: in seconds.

    Raises:
        JobFailedError: with the end of the log.
    """
    folder = output / name
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "megatron_ckpt_ext.cli.main", "run", "--cpu", "--nproc", str(ranks)),
        *("--recipe", str(ROOT / "recipes" / "cpu_laptop.yaml"), str(ROOT / "functional_tests" / "state_dump.py")),
        *arguments,
    ]
    environment = os.environ | {
        "OUTPUT": str(output),
        "PYTHONPATH": str(ROOT),
        "STATE_DUMP_FOLDER": str(folder / "dump"),
        "STATE_DUMP_SCRIPT": str(ROOT / "recipes" / "pretrain_gpt.py"),
        "STATE_DUMP_STOCK": "1" if stock else "",
    }
    log = folder / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | str = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"none within {timeout:g} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        end = log.read_text(errors="replace")[-4000:]
        raise JobFailedError(f"job {name} ended with exit code {code}; the end of its log:\n{end}")
    return Job(name=name, folder=folder)


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
