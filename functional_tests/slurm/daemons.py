"""Daemons that run as children of this process, and what runs in their mount namespaces."""

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Daemon", "processes_in_namespace"]


class Daemon:
    """A program in the foreground, with its output in a log; it is killed when this process ends without a word.

    Args:
        command: to run.
        log: of its output.
        environment: all of it.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        with open(log, "w") as file:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def own_namespace(self, seconds: float) -> str | None:
        """Wait until it is in a mount namespace of its own, and return which; ``None`` if it is not in time."""
        ours, deadline = os.readlink("/proc/self/ns/mnt"), time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            namespace = os.readlink(f"/proc/{self._process.pid}/ns/mnt")
            if namespace != ours:
                return namespace
            time.sleep(0.01)
        return None

    def stop(self, seconds: float) -> None:
        """Ask it to end, and kill it after this many seconds."""
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def processes_in_namespace(namespace: str) -> list[int]:
    """Return every process in a mount namespace, as ``/proc/PID/ns/mnt`` names it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "ns" / "mnt") == namespace:
                found.append(int(process.name))
    return found
