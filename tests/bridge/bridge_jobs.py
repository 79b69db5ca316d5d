"""Jobs of Megatron-Bridge on two CPU ranks, and what they printed."""

import re
from pathlib import Path
from typing import Any

from jobs import Job, run_job

__all__ = ["checkpoints", "losses", "run_bridge_job", "steps"]

SCRIPT = Path(__file__).resolve().parent / "cpu_job.py"
LOSS = re.compile(r"iteration +(\d+)/.*lm loss: ([0-9.E+-]+)")


def checkpoints(output: Path) -> Path:
    """Where all jobs of this folder save, and load from."""
    return output / "checkpoints"


def run_bridge_job(
    name: str, *overrides: str, output: Path, kind: str = "", recipe: str = "tiny_gpt", **options: Any
) -> Job:
    """Run ``recipes/bridge/pretrain.py`` with overrides.

    Args:
        name: as for ``run_job``.
        *overrides: as Bridge takes them; ``checkpoint.async_save`` is set by one.
        output: as for ``run_job``.
        kind: of ``cpu_job``.
        recipe: of ``tiny_gpt``.
        **options: of ``run_job``.
    """
    folder = checkpoints(output)
    given = [f"checkpoint.save={folder}", f"checkpoint.load={folder}", "checkpoint.async_save=true"]
    if kind != "stock":
        given.append(f"checkpoint.ckpt_events={output / name / 'events'}")
    environment = {
        "BRIDGE_JOB": kind,
        "NOTES_FILE": str(output / name / "notes"),
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",  # Bridge refuses Megatron-FSDP with the 1 of the emulation
    }
    return run_job(
        name,
        ("--recipe", f"bridge.tiny_gpt:{recipe}", *given, *overrides),
        output=output,
        recipe=None,
        script=SCRIPT,
        environment=environment,
        **options,
    )


def losses(job: Job) -> dict[int, str]:
    """Iteration -> loss, as Bridge printed it."""
    return {int(step): loss for step, loss in LOSS.findall(job.log)}


def steps(output: Path) -> list[str]:
    """Folders of published steps."""
    return sorted(path.parent.name for path in checkpoints(output).glob("iter_*/.metadata"))
