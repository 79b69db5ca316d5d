"""The real two-node Slurm: jobs on both nodes through ``train.sbatch``, and nothing left when it is closed."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import NODES, Cluster, SlurmError

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root"),
]

MEET = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.tensor([2.0 ** rank])
dist.all_reduce(total)
open(f"{sys.argv[2]}/{rank}", "w").write(os.environ["SLURMD_NODENAME"])
print(f"rank {rank} of {world} on {os.environ['SLURMD_NODENAME']}: {total.item():g}", flush=True)
dist.destroy_process_group()
if sys.argv[1] == "wait":
    time.sleep(300)
sys.exit(int(sys.argv[1]) if rank == 1 else 0)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One for all tests; it installs Slurm where that is not there."""
    with Cluster() as running:
        yield running


def run(cluster: Cluster, tmp_path: Path, word: str, *, ranks: int = 1, timeout: float = 90.0) -> tuple[int, str]:
    """Run a job whose ranks meet; returns its exit code and its log."""
    script, log = tmp_path / "meet.py", tmp_path / "log"
    script.write_text(MEET)
    environment = {
        **os.environ,
        "OUTPUT": str(tmp_path),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "RANKS_PER_NODE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }
    words = ["--cpu", str(script), word, str(cluster.local)]
    code = cluster.submit(words, name=tmp_path.name, environment=environment, log=log, timeout=timeout)
    return code, log.read_text()


def settled(cluster: Cluster) -> list[int]:
    """Processes on the nodes beside their daemons, once what has ended is gone."""
    deadline = time.monotonic() + 15
    while len(cluster.processes()) > len(NODES) and time.monotonic() < deadline:
        time.sleep(0.1)
    return cluster.processes()[len(NODES) :]


def test_ranks_of_two_nodes_meet_and_have_storage_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    code, log = run(cluster, tmp_path, "0", ranks=2)

    assert code == 0, log
    for rank, node in enumerate(("node1", "node1", "node2", "node2")):
        assert f"rank {rank} of 4 on {node}: 15" in log
        assert (cluster.behind_local(node) / str(rank)).read_text() == node
    assert not (cluster.behind_local("node1") / "2").exists()
    assert not list(cluster.local.iterdir())  # of this process, which is on neither node
    assert settled(cluster) == []


def test_the_exit_code_of_a_rank_is_that_of_the_job(cluster: Cluster, tmp_path: Path) -> None:
    code, log = run(cluster, tmp_path, "7")

    assert code == 7, log
    assert settled(cluster) == []


def test_what_cannot_work_is_said_once_and_no_rank_is_started(cluster: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {**os.environ, "OUTPUT": str(tmp_path), "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    words = [str(tmp_path / "nowhere.py")]

    code = cluster.submit(words, name="bad", environment={**environment, "RANKS_PER_NODE": "1"}, log=log, timeout=60)

    assert code == 2
    assert log.read_text().count("is not a file") == 1


def test_a_job_that_does_not_end_is_cancelled_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match=r"was RUNNING after 12 s and is cancelled"):
        run(cluster, tmp_path, "wait", timeout=12.0)

    assert settled(cluster) == []


def test_a_requeued_job_is_run_again_as_it_was(cluster: Cluster, tmp_path: Path) -> None:
    done: list[tuple[int, str]] = []
    thread = threading.Thread(target=lambda: done.append(run(cluster, tmp_path, "wait", timeout=120.0)))
    thread.start()
    job = until(cluster.jobs)[0]
    until(lambda: "of 2 on node2" in _read(tmp_path / "log"))
    (tmp_path / "meet.py").write_text(MEET.replace("time.sleep(300)", "sys.exit(0)"))

    cluster.requeue(job)
    thread.join(150)

    assert done and done[0][0] == 0, _read(tmp_path / "log")
    assert done[0][1].count("rank 0 of 2 on node1: 3") == 2  # the log of a requeued job goes on


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_second_one_is_refused_while_the_first_runs(cluster: Cluster) -> None:
    with pytest.raises(SlurmError, match=r"a Slurm is running here already \(slurmctld, slurmd\)"):
        Cluster()
