"""What `.ci/run` makes of the outcome of `make test`; a stand-in for `make` says how the tests went."""

import os
import subprocess
from pathlib import Path

import pytest

CI_RUN = Path(__file__).resolve().parents[1] / ".ci" / "run"


def ci_run(tmp_path: Path, *, says: str, status: int) -> subprocess.CompletedProcess[str]:
    """Runs the script with a `make` that fills VENV, prints what it is told to, and exits."""
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(f'#!/bin/sh\nmkdir -p "$VENV/bin"\necho "make $*"\nprintf "{says}\\n"\nexit {status}\n')
    make.chmod(0o755)
    (tmp_path / "scratch").mkdir()
    env = {"PATH": f"{make.parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path / "scratch")}
    return subprocess.run([CI_RUN], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("says", "status", "passes"),
    [
        ("12 passed, 1 skipped, 3 deselected in 75.31s (0:01:15)", 0, True),
        ("== 1 passed in 0.10s ==", 0, True),
        ("2 failed, 10 passed in 3.10s", 2, False),
        ("10 passed in 3.10s", 2, False),
        ("no tests ran in 0.01s", 0, False),
        ("3 deselected in 0.01s", 0, False),
        ("4 skipped in 0.01s", 0, False),
    ],
)
def test_verdict_and_closing_line(tmp_path: Path, says: str, status: int, passes: bool) -> None:
    done = ci_run(tmp_path, says=says, status=status)
    assert (done.returncode == 0) == passes
    assert done.stdout.splitlines()[0] == "make test"
    assert done.stdout.splitlines()[-1] == says
    assert list((tmp_path / "scratch").iterdir()) == []


def test_silence_is_a_failure(tmp_path: Path) -> None:
    done = ci_run(tmp_path, says="nothing of interest", status=0)
    assert done.returncode != 0
    assert "no test ran" in done.stdout
