"""Jobs of Megatron-FSDP that say in ``nvrx.RANK`` what they had of NVRx, and that can lack what ``kind`` names."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import FSDP_RECIPE, ROOT, Job, run_job

SCRIPT = ROOT / "tests" / "megatron_fsdp_training.py"


def run_fsdp_job(name: str, arguments: Sequence[str], *, output: Path, kind: str = "", **options: Any) -> Job:
    """Run the recipe of Megatron-FSDP, with events unless it is stock.

    Args:
        name: as for ``run_job``.
        arguments: as for ``run_job``.
        output: as for ``run_job``.
        kind: of ``megatron_fsdp_training``.
        **options: of ``run_job``.
    """
    events = () if kind == "stock" else ("--ckpt-events", str(output / name / "events"))
    return run_job(
        name,
        (*arguments, *events),
        output=output,
        **{"recipe": FSDP_RECIPE, "script": SCRIPT, "environment": {"FSDP_JOB": kind}, "timeout": 120, **options},
    )


def nvrx_of(job: Job) -> list[dict[str, Any]]:
    """Return what each rank had of NVRx at its end: ``loaded`` modules, and the ``error`` of one more import."""
    return [json.loads(path.read_text()) for path in sorted(job.dump.glob("nvrx.*"))]
