"""The job script for clusters, and the parts of the two-node Slurm that need no daemons.

``srun`` and ``scontrol`` are stand-ins that write down how they were called; the real ones are in
``test_slurm_cluster.py``.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest
from cluster import NODES, SCRIPT, JobState, configuration, reason_to_refuse
from daemons import Daemon, processes_in_namespace
from packages import PackagesError, install_missing

# train.sbatch

JOB = {
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
}
SCONTROL = """
case "$*" in
    "show hostnames gpu[07-08]") printf 'gpu07\\ngpu08\\n' ;;
    "show node gpu07") printf '   NodeAddr=10.0.0.7 NodeHostName=gpu07 Version=22.05\\n' ;;
    *) exit 1 ;;
esac
"""
SRUN = r"""
printf '%s\0' "$@" >>"$CALLS"
printf 'end\0' >>"$CALLS"
case "$*" in *--dry-run*) exit "${DRY_RUN_CODE:-0}" ;; esac
[ -z "${FAILED_WITH:-}" ] || echo "$FAILED_WITH" >"$FIRST_FAILURE"
exit "${CODE:-0}"
"""


def submit(tmp_path: Path, *words: str, **variables: str) -> tuple[int, str, list[list[str]]]:
    """Run the job script as Slurm would; returns its exit code, what it said, and how ``srun`` was called."""
    (tmp_path / "bin").mkdir()
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        stand_in(tmp_path / "bin" / name, script)
    calls = tmp_path / "calls"
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls), **variables}
    done = subprocess.run(["bash", SCRIPT, *words], env=environment, capture_output=True, text=True, check=False)
    made = calls.read_text().split("end\0")[:-1] if calls.exists() else []
    return done.returncode, done.stderr, [call.split("\0")[:-1] for call in made]


def stand_in(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_job_is_checked_on_one_node_and_then_run_on_all(tmp_path: Path) -> None:
    code, said, (dry, real) = submit(
        tmp_path, "--recipe", "r.yaml", "train.py", "--seed", "1 2", OUTPUT=str(tmp_path / "run"), **JOB
    )

    assert (code, said) == (0, "")
    assert {"--nodes=1", "--ntasks=1", "--nodelist=gpu07", "--ntasks-per-node=1"} <= set(dry)
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(real)
    words = ["--recipe", "r.yaml", "train.py", "--seed", "1 2"]
    rendezvous = ["--nnodes", "2", "--nproc", "8", "--master-addr", "10.0.0.7", "--master-port", "22345"]
    assert real[-len(rendezvous + words) :] == [*rendezvous, *words]
    assert dry[-len(words) - 1 :] == ["--dry-run", *words]
    assert (tmp_path / "run").is_dir()


def test_what_runs_on_a_node_is_the_launcher_with_the_number_of_the_node(tmp_path: Path) -> None:
    _, _, (_, real) = submit(tmp_path, "train.py", OUTPUT=str(tmp_path), PYTHON="/venv/bin/python", **JOB)
    at = real.index("bash")
    assert real[at + 1] == "-c"

    done = subprocess.run(
        ["bash", "-c", real[at + 2], *real[at + 3 :]],
        env={"PATH": os.environ["PATH"], "PYTHON": "echo", "SLURM_NODEID": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("-m megatron_ckpt_ext.cli.main run --node-rank 1 --nnodes 2 --nproc 8 ")
    assert done.stdout.endswith("train.py\n")


def test_a_node_that_fails_keeps_its_exit_code_and_gives_the_others_time(tmp_path: Path) -> None:
    _, _, (_, real) = submit(tmp_path, "train.py", OUTPUT=str(tmp_path), **JOB)
    stand_in(tmp_path / "bin" / "sleep", 'echo "slept $1"')
    stand_in(tmp_path / "bin" / "python3", "exit 7")
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_NODEID": "0"}
    environment["FIRST_FAILURE"] = str(tmp_path / "failed")

    script = real[real.index("bash") + 2]
    done = subprocess.run(["bash", "-c", script, "bash"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, (tmp_path / "failed").read_text()) == (7, "slept 5\n", "7\n")

    stand_in(tmp_path / "bin" / "python3", "exit 9")
    done = subprocess.run(["bash", "-c", script, "bash"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, (tmp_path / "failed").read_text()) == (9, "", "7\n")


@pytest.mark.parametrize(
    ("words", "variables", "complaint"),
    [
        (["train.py"], {"SLURM_JOB_ID": ""}, "submit it with sbatch"),
        (["train.py"], {"OUTPUT": ""}, "OUTPUT is not set"),
        ([], {}, "no training script was given"),
        (["train.py"], {"SLURM_GPUS_ON_NODE": ""}, "Slurm gave no GPUs"),
        (["train.py"], {"RANKS_PER_NODE": "9"}, "RANKS_PER_NODE is 9 and a node has 8 GPUs"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_nothing_is_started(
    tmp_path: Path, words: list[str], variables: dict[str, str], complaint: str
) -> None:
    code, said, calls = submit(tmp_path, *words, **{**JOB, "OUTPUT": str(tmp_path), **variables})

    assert code == 2
    assert said.startswith("train.sbatch: ") and complaint in said and said.count("\n") == 1
    assert calls == []


def test_what_the_dry_run_refuses_is_not_started(tmp_path: Path) -> None:
    code, _, calls = submit(tmp_path, "train.py", OUTPUT=str(tmp_path), DRY_RUN_CODE="2", **JOB)

    assert (code, len(calls)) == (2, 1)


def test_the_exit_code_is_that_of_the_job(tmp_path: Path) -> None:
    code, _, calls = submit(tmp_path, "train.py", OUTPUT=str(tmp_path), CODE="137", **JOB)

    assert (code, len(calls)) == (137, 2)


def test_the_exit_code_is_that_of_the_node_that_failed_first(tmp_path: Path) -> None:
    code, _, _ = submit(tmp_path, "train.py", OUTPUT=str(tmp_path / "run"), CODE="143", FAILED_WITH="7", **JOB)

    assert code == 7
    assert list((tmp_path / "run").iterdir()) == []


def test_a_container_is_srun_arguments_and_only_with_an_image(tmp_path: Path) -> None:
    image = {"CONTAINER_IMAGE": "/images/a b.sqsh", "CONTAINER_MOUNTS": "/a:/b", "CONTAINER_ARGS": "--x --y=1"}
    _, _, with_image = submit(tmp_path, "train.py", OUTPUT=str(tmp_path), **JOB, **image)

    for call in with_image:
        at = call.index("--container-image=/images/a b.sqsh")
        mounts = f"--container-mounts={tmp_path}:{tmp_path},/a:/b"
        assert call[at : at + 5] == [call[at], mounts, "--x", "--y=1", "bash"]


def test_without_gpus_the_ranks_are_named_and_the_port_may_be(tmp_path: Path) -> None:
    variables = {**JOB, "SLURM_GPUS_ON_NODE": "", "RANKS_PER_NODE": "2", "RENDEZVOUS_PORT": "29500"}

    code, _, (_, real) = submit(tmp_path, "train.py", **{**variables, "OUTPUT": str(tmp_path)})

    assert code == 0
    assert real[real.index("--nproc") + 1] == "2"
    assert real[real.index("--master-port") + 1] == "29500"
    assert not [word for word in real if word.startswith("--container")]


# The two-node Slurm


@pytest.mark.parametrize(
    ("processes", "environment", "configured", "complaint"),
    [
        (["bash", "slurmctld"], {}, [], "a Slurm is running here already (slurmctld)"),
        (["slurmd", "slurmdbd"], {}, [], "(slurmd, slurmdbd)"),
        ([], {}, [Path("/etc/slurm/slurm.conf")], "belongs to a Slurm cluster (/etc/slurm/slurm.conf exists)"),
        ([], {"SLURM_CONF": "x"}, [], "a shell of a Slurm cluster"),
        ([], {"SLURM_JOB_ID": "1"}, [], "a shell of a Slurm cluster"),
    ],
)
def test_a_slurm_that_is_there_is_not_touched(
    processes: list[str], environment: dict[str, str], configured: list[Path], complaint: str
) -> None:
    refusal = reason_to_refuse(processes=processes, environment=environment, configured=configured, is_root=True)

    assert complaint in refusal


@pytest.mark.parametrize("is_root", [True, False])
def test_nothing_but_root_is_missing(is_root: bool) -> None:
    refusal = reason_to_refuse(processes=["bash"], environment={}, configured=[], is_root=is_root)

    assert refusal == ("" if is_root else refusal) and ("needs root" in refusal) is not is_root


def test_everything_of_a_cluster_is_in_its_folder_and_on_its_ports(tmp_path: Path) -> None:
    text = configuration(tmp_path, [7001, 7002, 7003])

    settings = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    assert settings["SlurmctldPort"] == "7001"
    places = [value for value in settings.values() if "/" in value and not value.startswith(("auth/", "proctrack/"))]
    assert places and all(
        str(tmp_path) in value or value.startswith(("task/", "select/", "localhost")) for value in places
    )
    for node, port in zip(NODES, (7002, 7003), strict=True):
        assert f"NodeName={node} NodeHostName=localhost NodeAddr=127.0.0.1 Port={port} " in text


@pytest.mark.parametrize(
    ("record", "ended", "code"),
    [
        ("JobId=3 JobName=a b JobState=RUNNING Reason=None ExitCode=0:0 RunTime=1", False, 0),
        ("JobId=3 JobState=COMPLETING ExitCode=0:0", False, 0),
        ("JobId=3 JobState=COMPLETED ExitCode=0:0", True, 0),
        ("JobId=3 JobState=FAILED ExitCode=7:0", True, 7),
        ("JobId=3 JobState=CANCELLED ExitCode=0:15", True, 143),
    ],
)
def test_the_state_of_a_job(record: str, ended: bool, code: int) -> None:
    state = JobState.of(record)

    assert (state.has_ended, state.exit_code) == (ended, code)


def test_a_daemon_that_does_not_want_to_end_is_killed(tmp_path: Path) -> None:
    script = 'trap "" TERM; echo ready; while true; do sleep 0.1; done'
    daemon = Daemon(["bash", "-c", script], tmp_path / "log", dict(os.environ))
    deadline = time.monotonic() + 10
    while "ready" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    pid = daemon.pid

    daemon.stop(0.2)

    assert not Path(f"/proc/{pid}").exists()


def test_processes_are_found_by_their_namespace() -> None:
    assert os.getpid() in processes_in_namespace(os.readlink("/proc/self/ns/mnt"))
    assert processes_in_namespace("mnt:[0]") == []


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ``apt-get`` alone on the path, which writes down its calls and fails as often as a file says."""
    script = (
        'echo "$@" >>calls; n=$(cat failures); [ "$n" -eq 0 ] || { echo $((n - 1)) >failures; echo no >&2; exit 1; }'
    )
    (tmp_path / "bin").mkdir()
    stand_in(tmp_path / "bin" / "apt-get", f"PATH=/bin:/usr/bin; cd {tmp_path}\n{script}")
    (tmp_path / "failures").write_text("0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("packages.PAUSE", 0.0)
    monkeypatch.setattr("packages.INIT", tmp_path / "init")
    return tmp_path


INSTALL = "--quiet install --yes --no-install-recommends munge slurm-client slurmctld slurmd"


def test_missing_packages_are_installed(apt: Path) -> None:
    install_missing()

    assert (apt / "calls").read_text().splitlines() == ["--quiet update", INSTALL]


def test_an_installation_is_tried_twice(apt: Path) -> None:
    (apt / "failures").write_text("1")
    install_missing()
    assert (apt / "calls").read_text().splitlines() == ["--quiet update", "--quiet update", INSTALL]

    (apt / "failures").write_text("9")
    with pytest.raises(PackagesError, match="apt-get could not install munge slurm-client slurmctld slurmd: no"):
        install_missing()


def test_only_what_is_missing_is_installed(apt: Path) -> None:
    for program in ("slurmctld", "slurmd", "sbatch"):
        stand_in(apt / "bin" / program, "")
    install_missing()
    assert (apt / "calls").read_text().splitlines()[-1].endswith(" munge")

    stand_in(apt / "bin" / "munged", "")
    (apt / "calls").unlink()
    install_missing()
    assert not (apt / "calls").exists()


def test_where_an_init_system_would_start_services_nothing_is_installed(apt: Path) -> None:
    (apt / "init").mkdir()

    with pytest.raises(PackagesError, match="would start their services here"):
        install_missing()
    assert not (apt / "calls").exists()


def test_without_apt_the_missing_packages_are_named(apt: Path) -> None:
    (apt / "bin" / "apt-get").unlink()

    with pytest.raises(PackagesError, match="munge slurm-client slurmctld slurmd are missing and there is no apt-get"):
        install_missing()
