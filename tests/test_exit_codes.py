"""A job that finds no checkpoint where it needs one ends with a code that is not zero: no scheduler takes it for done.

Megatron's own functions, with the package installed by its launcher.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys
from argparse import Namespace
from megatron.training import checkpointing
from megatron_ckpt_ext.errors import ConfigurationError
folder = sys.argv[1]
class Arguments(Namespace):
    def __getattr__(self, name):
        return None
args = Arguments(ckpt_format="torch_dist", exit_on_missing_checkpoint=True)
try:
    checkpointing._load_base_checkpoint(f"{folder}/nothing", args, rank0=False)
except SystemExit as end:
    print("exit code", int(end.code or 0), flush=True)
except ConfigurationError:
    print("exit code", 2, flush=True)  # the launcher's, as below
checkpointing.read_metadata(f"{folder}/latest_checkpointed_iteration.txt")
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> "subprocess.CompletedProcess[str]":
    """A process that asks Megatron for a checkpoint that is not there, and then reads a tracker that is empty."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "nothing").mkdir()
    (folder / "latest_checkpointed_iteration.txt").touch()
    (folder / "program.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, "-m", "megatron_ckpt_ext.launch", "--cpu", str(folder / "program.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_an_empty_tracker_ends_the_job_with_a_code_and_a_way_out(job: "subprocess.CompletedProcess[str]") -> None:
    assert job.returncode != 0
    assert "latest_checkpointed_iteration.txt does not hold the number of an iteration" in job.stderr


def test_a_checkpoint_that_is_required_and_missing_ends_the_job_with_a_code(
    job: "subprocess.CompletedProcess[str]",
) -> None:
    (line,) = [line for line in job.stdout.splitlines() if line.startswith("exit code")]

    assert line != "exit code 0"
