"""The set-up script, run for real up to the point where an environment would be filled.

Not tested here: a whole set-up, which downloads gigabytes; `.ci/run` does one on every run.
"""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "setup_env.sh"
TOOLS = "awk bash cat cut df dirname env flock head mkdir rm sh sha256sum tail".split()
# No test may download an environment, not even when it fails.
NO_INDEX = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_RETRIES": "0"}
ANY_SIZE = {"MCE_MIN_FREE_GB": "0"}
NO_SPACE = {"MCE_MIN_FREE_GB": "1000000000"}


def set_up(venv: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"PATH": os.environ["PATH"], "HOME": str(venv.parent), "PYTHON": sys.executable}
    env = own | NO_INDEX | environment
    return subprocess.run([SCRIPT, venv], env=env, capture_output=True, text=True, timeout=60, check=False)


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the one line on stderr of a set-up that failed."""
    assert done.returncode != 0, done.stdout
    (line,) = done.stderr.splitlines()
    return line


def stamp_as_ready(venv: Path) -> None:
    parts = [ROOT / "pyproject.toml", ROOT / "tools" / "constraints.txt", SCRIPT]
    (venv / ".set-up-stamp").write_text(sha256(b"".join(part.read_bytes() for part in parts)).hexdigest() + "\n")
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(sys.executable)


def executable(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    return tmp_path / "venv"


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A folder for PATH with the script's own tools and no interpreter."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        where = shutil.which(tool)
        assert where is not None, tool
        (folder / tool).symlink_to(where)
    return folder


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A loopback port that refuses connections: bound, so that nobody else takes it, and not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_no_interpreter(venv: Path, bare_path: Path) -> None:
    said = sentence(set_up(venv, PATH=str(bare_path), PYTHON="", **ANY_SIZE))
    assert "Python 3.12 or newer" in said
    assert "PYTHON=PATH" in said


def test_interpreter_that_is_too_old(venv: Path, tmp_path: Path) -> None:
    old = executable(tmp_path / "python3", "exit 1")
    said = sentence(set_up(venv, PYTHON=str(old), **ANY_SIZE))
    assert f"none of these is one: {old};" in said


def test_failing_pyenv_shim_does_not_hide_the_version_behind_it(venv: Path, bare_path: Path, tmp_path: Path) -> None:
    executable(bare_path / "python3.12", "exit 127")
    behind = executable(tmp_path / "pyenv/versions/3.12.9/bin/python", f'exec {sys.executable} "$@"')
    search = {"PATH": str(bare_path), "PYENV_ROOT": str(tmp_path / "pyenv"), "PYTHON": ""}
    done = set_up(venv, **search, **ANY_SIZE)
    assert f"making {venv} with {behind}" in done.stdout


def test_too_little_disk(venv: Path) -> None:
    said = sentence(set_up(venv, **NO_SPACE))
    assert "needs 1000000000 GB of free disk" in said
    assert "VENV=PATH" in said
    assert not (venv / "bin").exists()


def test_no_registry(venv: Path, closed_port: int) -> None:
    index = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": f"http://127.0.0.1:{closed_port}/simple"}
    said = sentence(set_up(venv, **index, **ANY_SIZE))
    assert "pip could not install what is needed" in said
    assert "package index can be reached" in said
    assert not (venv / ".set-up-stamp").exists()


def test_ready_environment_is_left_alone(venv: Path) -> None:
    venv.mkdir()
    stamp_as_ready(venv)
    done = set_up(venv, **NO_SPACE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_stamp_of_another_state_of_the_checkout_does_not_count(venv: Path) -> None:
    venv.mkdir()
    stamp_as_ready(venv)
    (venv / ".set-up-stamp").write_text("0" * 64 + "\n")
    assert "of free disk" in sentence(set_up(venv, **NO_SPACE))


def test_second_set_up_waits_for_the_first_and_uses_its_result(venv: Path) -> None:
    venv.mkdir()
    with (venv / ".set-up-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another set-up holds" in sentence(set_up(venv, MCE_LOCK_SECONDS="0.2"))
        second = subprocess.Popen([SCRIPT, venv], env={"PATH": os.environ["PATH"], **NO_SPACE})
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(0.5)
        stamp_as_ready(venv)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert second.wait(30) == 0
