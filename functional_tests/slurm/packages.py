"""Debian packages that a cluster needs, installed where they are missing."""

import os
import shutil
import subprocess
import time
from pathlib import Path

__all__ = ["PROGRAMS", "PackagesError", "install_missing"]

PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
"""Program -> package."""
INIT = Path("/run/systemd/system")
DEADLINE = 300.0
PAUSE = 5.0


class PackagesError(Exception):
    """A package that cannot be installed; one sentence."""


def install_missing() -> None:
    """Install the packages of the programs that are not there, with apt-get; tries it twice.

    What is installed stays. Where an init system would start the services of the packages, nothing is installed.

    Raises:
        PackagesError: there is no apt-get, it failed, or there is an init system.
    """
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise PackagesError(f"{' '.join(missing)} are missing and there is no apt-get here: install them.")
    if INIT.exists():
        raise PackagesError(
            f"{' '.join(missing)} are missing, and installing them would start their services here: install them "
            "yourself, with those services masked."
        )
    complaint = ""
    for attempt in range(2):
        if attempt:
            time.sleep(PAUSE)
        complaint = _apt_get("update") or _apt_get("install", "--yes", "--no-install-recommends", *missing)
        if not complaint:
            return
    raise PackagesError(f"apt-get could not install {' '.join(missing)}: {complaint}")


def _apt_get(*words: str) -> str:
    """Run apt-get; returns its last words if it failed."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            ["apt-get", "--quiet", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {DEADLINE:g} s."
    return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1] if done.returncode else ""
