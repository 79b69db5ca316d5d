"""What `.ci/run` makes of the outcome of `make test`; a stand-in for `make` says how the tests went."""

import os
import subprocess
from pathlib import Path

import pytest

CI_RUN = Path(__file__).resolve().parents[1] / ".ci" / "run"


def ci_run(
    tmp_path: Path, *, says: str, status: int, functional: int = 0, root: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs the script with a `make` that fills VENV, prints what it is told to, and exits, and a user of our choice."""
    (tmp_path / "bin").mkdir()
    test = f'printf "{says}\\n"; exit {status}'
    stand_in(
        tmp_path / "bin" / "make",
        f'mkdir -p "$VENV/bin"\necho "make $*"\nif [ "$1" = test ]; then {test}; fi\nexit {functional}',
    )
    stand_in(tmp_path / "bin" / "id", f"echo {0 if root else 1000}")
    stand_in(tmp_path / "bin" / "apt-get", "exit 1")
    (tmp_path / "scratch").mkdir()
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(tmp_path / "scratch")}
    return subprocess.run([CI_RUN], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def stand_in(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


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


@pytest.mark.parametrize(("functional", "passes"), [(0, True), (1, False)])
def test_root_runs_the_short_functional_selection_whatever_the_tests_say(
    tmp_path: Path, functional: int, passes: bool
) -> None:
    done = ci_run(tmp_path, says="12 passed in 75.31s (0:01:15)", status=0, functional=functional)

    assert (done.returncode == 0) == passes
    assert "make functional SCOPE=mr-github-slim" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "12 passed in 75.31s (0:01:15)"


def test_failed_tests_stay_failed_when_the_functional_cases_pass(tmp_path: Path) -> None:
    assert ci_run(tmp_path, says="1 failed, 2 passed in 3.10s", status=2).returncode == 2


def test_without_root_the_functional_cases_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    done = ci_run(tmp_path, says="12 passed in 75.31s (0:01:15)", status=0, functional=1, root=False)

    assert done.returncode == 0
    assert "make functional SCOPE=mr-github-slim" not in done.stdout.splitlines()
    assert "ci: the functional cases are left out: they need root and apt-get" in done.stdout.splitlines()
