"""What a two-node Slurm leaves: nothing when it is closed, and no process when whoever started it is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import NODES
from daemons import processes_in_namespace

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root"),
]

STARTED = """
import signal, sys, time
sys.path[:0] = [{folder!r}]
from cluster import Cluster
cluster = Cluster()
print(cluster.local.parent, *[daemon.pid for daemon in cluster._daemons], *sorted(cluster._namespaces), flush=True)
if sys.argv[1] == "close":
    cluster.close()
    cluster.close()
else:
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["close", "kill"])
def test_nothing_is_left(end: str) -> None:
    folder = str(ROOT / "functional_tests" / "slurm")
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTED.format(folder=folder), end], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    place, *found = starter.stdout.readline().split()
    pids, namespaces = [word for word in found if word.isdecimal()], [word for word in found if "mnt" in word]
    assert len(pids) == 2 + len(NODES) and len(namespaces) == len(NODES)
    if end == "kill":
        starter.kill()
    starter.wait(60)

    deadline = time.monotonic() + 30
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in pids if _runs(pid)] == []
    assert [processes_in_namespace(namespace) for namespace in namespaces] == [[], []]
    assert Path(place).exists() is (end == "kill")


def _runs(pid: str) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
