"""A process that ends with a queue that nobody closed: exit code 0, no traceback, no process left, no quiet loss.

A save in flight together with a group that is gone is in ``test_writer.py``.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import os, sys
import torch.distributed as dist
from pathlib import Path
from queue_scenarios import gated
from guarantee_scenarios import write_pid
from megatron_ckpt_ext.commit.queue import AsyncSaveQueue
from megatron_ckpt_ext.compat.nvrx import AsyncRequest
from megatron_ckpt_ext.write.worker import WorkerSettings
how, folder = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
queue = AsyncSaveQueue(lambda: WorkerSettings(rank=0, cpu_priority=0))
queue.schedule_async_request(AsyncRequest(write_pid, (folder / "pid",), []))
queue.maybe_finalize_async_calls(blocking=True)
if how == "in_flight":
    finalizer = (folder / "finalized").touch
    queue.schedule_async_request(AsyncRequest(gated, (folder / "never", print), [finalizer]))
if how == "group_gone":
    dist.destroy_process_group()
"""
HOW = ("group_gone", "in_flight")
type Ended = dict[str, tuple[int, str, Path]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Exit code, stderr and folder of a process that ends in each way; side by side, for each imports for seconds."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "GLOO_SOCKET_IFNAME": "lo"}
    running = {}
    for how in HOW:
        folder = tmp_path_factory.mktemp(how)
        command = [sys.executable, "-c", PROGRAM, how, str(folder)]
        running[how] = (subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment), folder)
    found = {}
    for how, (process, folder) in running.items():
        _, errors = process.communicate(timeout=90)
        found[how] = (process.returncode, errors, folder)
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("how", HOW)
def test_a_process_ends_cleanly_with_an_open_queue(ended: Ended, how: str) -> None:
    code, errors, folder = ended[how]

    assert code == 0
    assert "Traceback" not in errors
    assert "Exception" not in errors
    deadline = time.monotonic() + 20
    while is_alive(int((folder / "pid").read_text())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(int((folder / "pid").read_text()))


def test_a_save_that_the_exit_cuts_off_is_not_finalized_and_is_told(ended: Ended) -> None:
    _, errors, folder = ended["in_flight"]

    assert not (folder / "finalized").exists()
    assert "not finalized" in errors or "not complete" in errors or "not durable" in errors
