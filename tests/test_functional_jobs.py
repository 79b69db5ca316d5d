"""What judges the functional cases: it must be able to say no. And what kills and finds the processes of a job."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from case_jobs import Place
from cases import read_case
from evidence import Evidence
from job_processes import MARK, KillerOfRanks, processes_of, remaining_processes
from jobs import Job
from rich.console import Console
from run_cases import tell
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from trainers import trainer_of

from megatron_ckpt_ext.events import EventLog, Phase

type Process = subprocess.Popen[bytes]

CASE = read_case("fsdp2", "manager_killed")
RESUMED = CASE.lives[1]


def put(checkpoint: Path, value: int) -> None:
    """Save one tensor."""
    writer = FileSystemWriter(checkpoint, overwrite=True)
    save({"weight": torch.full((4,), value)}, storage_writer=writer, no_dist=True)


@pytest.fixture
def good(tmp_path: Path) -> Evidence:
    """A resumed life of the trainer as it should have been, and its reference, made here."""
    place = Place(output=tmp_path, local=tmp_path / "local", temporary=tmp_path / "tmp")
    place.environment("resumed")
    job, reference = (Job(name=name, folder=tmp_path / name) for name in ("resumed", "reference"))
    for folder, steps, begin in (
        (reference.folder, reference.folder / "steps", 1),
        (job.folder, tmp_path / "checkpoints", RESUMED.resumes + 1),
    ):
        folder.mkdir()
        (folder / "losses").write_text("".join(f"{step} {float(step).hex()} 0.1\n" for step in range(begin, 31)))
        for step in RESUMED.saves:
            put(steps / f"step_{step}", step)
    with EventLog(str(job.folder / "events"), 0) as log:
        for step, kind in RESUMED.saves.items():
            log.record(Phase.WRITE, step=step, seconds=1.0, collectives={**CASE.collectives[kind], "all_reduce": 2})
    return Evidence(case=CASE, life=RESUMED, job=job, reference=reference, trainer=trainer_of(CASE), place=place)


def failed(evidence: Evidence) -> list[str]:
    return [check.claim for check in evidence.checks() if not check.holds]


def test_a_good_life_has_nothing_against_it(good: Evidence) -> None:
    assert failed(good) == []
    assert len(list(good.checks())) == 11


def test_one_wrong_loss_is_found(good: Evidence) -> None:
    file = good.job.folder / "losses"
    file.write_text(file.read_text().replace(float(25).hex(), float(26).hex()))

    assert failed(good) == ["losses of steps 11 to 30 equal the reference's"]


def test_a_job_that_started_from_nothing_has_not_resumed(good: Evidence) -> None:
    file = good.job.folder / "losses"
    file.write_text(f"1 {(1.0).hex()} 0.1\n" + file.read_text())

    assert failed(good) == ["losses of steps 11 to 30 equal the reference's"]


def test_other_content_is_found(good: Evidence) -> None:
    put(good.directory / "step_20", 21)

    assert failed(good) == ["step 20 is the same bit for bit"]


def test_a_missing_byte_is_found(good: Evidence) -> None:
    (data,) = (good.directory / "step_30").glob("*.distcp")
    os.truncate(data, data.stat().st_size - 1)

    assert failed(good) == ["step 30 is complete", "30 is the newest complete step"]


@pytest.mark.parametrize("counts", [{"gather_object": 1}, {"barrier": 1}])
def test_one_more_collective_is_found(good: Evidence, counts: dict[str, int]) -> None:
    with EventLog(str(good.job.folder / "events"), 0) as log:
        log.record(Phase.COMMIT, step=30, seconds=1.0, collectives=counts)

    assert failed(good) == ["step 30 costs what later may cost: no collective and polls"]


def test_a_rebuild_that_was_not_expected_is_found_and_one_that_was_is_missed(good: Evidence) -> None:
    with EventLog(str(good.job.folder / "events"), 0) as log:
        log.record(Phase.REBUILD, step=20, seconds=1.0, reason="drift")
    (claim,) = failed(good)
    assert "rebuilds" in claim

    life = replace(RESUMED, saves={20: "rebuilt"})
    case = replace(CASE, collectives={"rebuilt": CASE.collectives["first"]})
    assert good.decisions().holds is False
    assert replace(good, life=life, case=case).decisions().holds is False  # "rebuilt" is no kind that starts so


def test_files_that_are_left_are_found(good: Evidence) -> None:
    (good.place.temporary / "torchelastic_a1").mkdir()
    (good.place.temporary / "pymp-x").mkdir()  # the first life of this case is killed
    assert failed(good) == []
    (good.directory / "step_30" / ".metadata.0123456789ab.tmp").touch()
    (good.place.temporary / "staged").touch()

    check = good.files()
    assert (check.holds, check.found) == (False, "['.metadata.0123456789ab.tmp', 'staged']")


def test_a_kill_that_came_too_late_is_found(good: Evidence) -> None:
    assert not good.killed(20).holds
    (good.directory / "step_20" / ".metadata").unlink()
    assert good.killed(20).holds


def test_a_node_without_its_prepared_file_is_found(good: Evidence, tmp_path: Path) -> None:
    nodes = tuple(tmp_path / name for name in ("one", "two"))
    for node in nodes:
        node.mkdir()
        (node / "prepared.metadata").write_text("same")
    on_two = replace(good, place=replace(good.place, behind_local=nodes))
    assert on_two.prepared_on_every_node().holds
    assert not good.prepared_on_every_node().holds

    (nodes[1] / "prepared.metadata").write_text("other")
    assert not on_two.prepared_on_every_node().holds
    (nodes[1] / "prepared.metadata").unlink()
    assert not on_two.prepared_on_every_node().holds


def test_the_verdict_is_one_line_and_what_did_not_hold(good: Evidence) -> None:
    page = Console(file=io.StringIO(), width=60)
    checks = list(good.checks())
    assert tell(page, CASE, checks, 1.0)
    assert not tell(page, CASE, [*checks, replace(checks[0], holds=False, found="[bold] 3 of 4")], 1.0)

    assert page.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "pass  manager_killed: 11 of 11 checks, 2 jobs, 1 s",
        "FAIL  manager_killed: 11 of 12 checks, 2 jobs, 1 s",
        f"      {checks[0].claim}: [bold] 3 of 4",
    ]


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Process]:
    """A rank of a job in ``tmp_path``."""
    process = sleeping({MARK: str(tmp_path), "LOCAL_RANK": "0"})
    yield process
    process.kill()
    process.wait()


def sleeping(variables: dict[str, str]) -> Process:
    """A process that has these variables from its beginning on."""
    process = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], **variables})
    while b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.01)
    return process


def test_processes_are_found_by_their_job_and_ranks_among_them(tmp_path: Path, sleeper: Process) -> None:
    launcher = sleeping({MARK: str(tmp_path)})
    other = sleeping({MARK: f"{tmp_path} too", "LOCAL_RANK": "0"})
    try:
        assert processes_of(tmp_path, ranks_only=True) == [sleeper.pid]
        assert sorted(processes_of(tmp_path)) == sorted([sleeper.pid, launcher.pid])
        assert sorted(remaining_processes(tmp_path, within=0.0)) == sorted([sleeper.pid, launcher.pid])
    finally:
        for process in (launcher, other):
            process.kill()
            process.wait()


def test_ranks_are_killed_when_the_condition_holds_and_not_before(tmp_path: Path, sleeper: Process) -> None:
    with KillerOfRanks(tmp_path, (tmp_path / "now").exists):
        time.sleep(0.1)
        assert sleeper.poll() is None
        (tmp_path / "now").touch()
        assert sleeper.wait(10) == -signal.SIGKILL
    assert remaining_processes(tmp_path) == []


def test_a_killer_that_is_not_needed_ends_with_its_job(tmp_path: Path, sleeper: Process) -> None:
    with KillerOfRanks(tmp_path, lambda: False):
        pass
    assert sleeper.poll() is None


def test_a_case_that_does_not_exist_is_refused_in_one_line() -> None:
    script = Path(__file__).resolve().parent.parent / "functional_tests" / "run_cases.py"
    done = subprocess.run([sys.executable, script, "no_such_case"], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "There is no case no_such_case" in done.stderr.splitlines()[-1]
