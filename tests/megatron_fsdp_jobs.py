"""Starting training jobs of Megatron-FSDP, with NVRx and without."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jobs import ROOT, Job

WITHOUT_NVRX = """
import sys, importlib.metadata
sys.modules["nvidia_resiliency_ext"] = None
installed = importlib.metadata.version
def version(name):
    if name == "nvidia-resiliency-ext":
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)
importlib.metadata.version = version
"""
"""Python runs this in each process of the job, as ``sitecustomize``."""


def run_fsdp_job(
    name: str, arguments: Sequence[str], *, output: Path, kind: str = "", nvrx: bool = True, exit_code: int = 0
) -> Job:
    """Run the recipe of Megatron-FSDP with more arguments.

    Args:
        name: also that of its folder in ``output``.
        arguments: behind those of the recipe; ``--ckpt-events`` is among them unless it is stock.
        output: folder of all jobs.
        kind: of ``megatron_fsdp_training``.
        nvrx: whether NVRx is installed.
        exit_code: with which it must end.
    """
    folder = output / name
    folder.mkdir()
    path = [str(ROOT), str(ROOT / "functional_tests")]
    if not nvrx:
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(WITHOUT_NVRX)
        path.insert(0, str(folder / "site"))
    command = [
        *(sys.executable, "-m", "megatron_ckpt_ext.cli.main", "run", "--cpu", "--nproc", "2"),
        *(
            "--recipe",
            str(ROOT / "recipes" / "cpu_fsdp_dtensor.yaml"),
            str(ROOT / "tests" / "megatron_fsdp_training.py"),
        ),
        *(arguments if kind == "stock" else (*arguments, "--ckpt-events", str(folder / "events"))),
    ]
    environment = os.environ | {
        "OUTPUT": str(output),
        "PYTHONPATH": os.pathsep.join(path),
        "STATE_DUMP_FOLDER": str(folder / "dump"),
        "STATE_DUMP_SCRIPT": str(ROOT / "recipes" / "pretrain_gpt.py"),
        "FSDP_JOB": kind,
    }
    log = folder / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == exit_code, log.read_text(errors="replace")[-4000:]
    return Job(name=name, folder=folder)
