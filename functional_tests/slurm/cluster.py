"""A two-node Slurm on this machine, private to whoever starts it: own configuration, ports, munge key, and storage.

Each node is a ``slurmd`` in a mount namespace of its own, in which one folder is the node's alone: node-local storage,
under one path on both nodes. Everything that runs on a node is in its namespace, which is how it is found when the
cluster ends.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from daemons import Daemon, processes_in_namespace
from packages import install_missing

__all__ = ["NODES", "SCRIPT", "Cluster", "JobState", "SlurmError", "configuration", "reason_to_refuse"]

NODES = ("node1", "node2")
SCRIPT = Path(__file__).resolve().parent / "train.sbatch"
START_DEADLINE = 30.0
STOP_DEADLINE = 15.0
POLL = 0.25
CONF = "SLURM_CONF"
"""Variable that tells Slurm's clients which cluster they are to ask."""
CLUSTER_DAEMONS = ("slurmctld", "slurmd", "slurmdbd", "sackd")
CONFIGURATIONS = tuple(
    Path(folder) / "slurm.conf"
    for folder in ("/etc/slurm", "/etc/slurm-llnl", "/opt/slurm/etc", "/usr/local/etc", "/usr/local/slurm/etc")
)


class SlurmError(Exception):
    """A cluster that cannot be, or a job that did not end; one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What Slurm says about a job."""

    name: str
    """Such as ``RUNNING``."""
    exit_code: int
    """Of the job script, or 128 and the number of the signal that ended it."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.name not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED")

    @classmethod
    def of(cls, record: str) -> Self:
        """Read one line of ``scontrol --oneliner show job``."""
        fields = dict(word.split("=", 1) for word in record.split() if "=" in word)
        code, number = map(int, fields["ExitCode"].split(":"))
        return cls(name=fields["JobState"], exit_code=128 + number if number else code)


def configuration(folder: Path, ports: Sequence[int]) -> str:
    """Return the text of ``slurm.conf``.

    Args:
        folder: of the cluster.
        ports: of the controller and of each node.
    """
    nodes = "\n".join(
        f"NodeName={node} NodeHostName=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8"
        for node, port in zip(NODES, ports[1:], strict=True)
    )
    return f"""\
ClusterName=functional
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# more CPUs a node than this machine has, so that four ranks fit
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
# how long the exit code of a job can be asked for
MinJobAge=300
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
{nodes}
PartitionName=both Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def reason_to_refuse(
    *, processes: Sequence[str], environment: Mapping[str, str], configured: Sequence[Path], is_root: bool
) -> str:
    """Say why no Slurm may be started here, or nothing: one that is there is not to be touched.

    Args:
        processes: names of all that run.
        environment: of this process.
        configured: configuration files that exist.
        is_root: whether this process may make mount namespaces.
    """
    running = sorted(set(processes) & set(CLUSTER_DAEMONS))
    if running:
        return (
            f"a Slurm is running here already ({', '.join(running)}): use another machine, or submit train.sbatch to it"
        )
    if configured:
        return f"this machine belongs to a Slurm cluster ({configured[0]} exists): submit train.sbatch there instead"
    if "SLURM_CONF" in environment or "SLURM_JOB_ID" in environment:
        return (
            "this is a shell of a Slurm cluster (SLURM_CONF or SLURM_JOB_ID is set): submit train.sbatch there instead"
        )
    if not is_root:
        return "a two-node Slurm on one machine needs root, for mount namespaces: run this as root"
    return ""


class Cluster:
    """A running two-node Slurm. A context manager; ``close`` stops exactly what it started.

    Attributes:
        local: the node-local folder, as the jobs of every node see it.
    """

    def __init__(self) -> None:
        """Install what is missing and start every daemon.

        Raises:
            SlurmError: there is a Slurm here already, or one cannot be started.
        """
        configured = [path for path in CONFIGURATIONS if path.exists()]
        refusal = reason_to_refuse(
            processes=_names(), environment=os.environ, configured=configured, is_root=os.geteuid() == 0
        )
        if refusal:
            raise SlurmError(f"{refusal}.")
        install_missing()
        self._folder = Path(tempfile.mkdtemp(prefix="two-node-slurm-"))
        self.local = self._folder / "local"
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self._environment[CONF] = str(self._folder / "slurm.conf")
        self._daemons: list[Daemon] = []
        self._namespaces: set[str] = set()
        with ExitStack() as stack:
            stack.callback(self.close)
            self._start()
            stack.pop_all()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def behind_local(self, node: str) -> Path:
        """Return the folder that ``local`` is on a node, as this process sees it."""
        return self._folder / node

    def submit(
        self,
        words: Sequence[str],
        *,
        name: str,
        environment: Mapping[str, str],
        log: Path,
        timeout: float,
    ) -> int:
        """Submit ``train.sbatch`` on both nodes and wait for its end.

        Args:
            words: behind the name of the script.
            name: of the job.
            environment: of the job.
            log: of everything that it prints.
            timeout: in seconds; then the job is cancelled.

        Returns:
            The exit code of the job.

        Raises:
            SlurmError: it could not be submitted, or had not ended in time.
        """
        options = (f"--nodes={len(NODES)}", f"--job-name={name}", f"--output={log}", "--export=ALL", "--parsable")
        job = self._ask("sbatch", *options, str(SCRIPT), *words, environment=environment).strip()
        deadline = time.monotonic() + timeout
        while not (state := self.state(job)).has_ended:
            if time.monotonic() > deadline:
                self.cancel(job)
                raise SlurmError(f"job {name} was {state.name} after {timeout:g} s and is cancelled; its log is {log}.")
            time.sleep(POLL)
        return state.exit_code

    def state(self, job: str) -> JobState:
        """Ask for the state of a job."""
        return JobState.of(self._ask("scontrol", "--oneliner", "show", "job", job))

    def cancel(self, job: str) -> None:
        """Cancel a job and wait for its end.

        Raises:
            SlurmError: it did not end.
        """
        self._ask("scancel", job)
        self._wait(lambda: self.state(job).has_ended, STOP_DEADLINE, f"job {job} did not end")

    def jobs(self) -> list[str]:
        """Return the jobs that have not ended."""
        return self._ask("squeue", "--noheader", "--format=%A").split()

    def requeue(self, job: str) -> None:
        """Let a running job start anew, and at once: Slurm would wait two minutes.

        Raises:
            SlurmError: it did not stop.
        """
        self._ask("scontrol", "requeue", job)
        self._wait(lambda: self.state(job).name == "PENDING", STOP_DEADLINE, f"job {job} did not stop")
        self._ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    def processes(self) -> list[int]:
        """Return every process that runs on a node."""
        return [pid for namespace in self._namespaces for pid in processes_in_namespace(namespace)]

    def close(self) -> None:
        """Cancel jobs, stop the daemons and whatever runs on the nodes, and remove the folder. Safe to call twice."""
        if self._daemons:
            self._end_jobs()
        while self._daemons:
            self._daemons.pop().stop(STOP_DEADLINE)
        deadline = time.monotonic() + STOP_DEADLINE
        while (left := self.processes()) and time.monotonic() < deadline:  # one may have started another meanwhile
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_jobs(self) -> None:
        """Cancel every job; one that does not end is killed with its node."""
        with contextlib.suppress(SlurmError):
            self._ask("scancel", "--partition=both")
            self._wait(lambda: not self.jobs(), STOP_DEADLINE, "a job did not end")

    def _start(self) -> None:
        folder = self._folder
        for name in ("log", "state", "local", *NODES):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(64))
        (folder / "munge.key").chmod(0o400)
        (folder / "slurm.conf").write_text(configuration(folder, _free_ports(1 + len(NODES))))
        munged = (
            "munged",
            "--foreground",
            "--force",
            f"--key-file={folder}/munge.key",
            f"--log-file={folder}/log/munged.log",
        )
        self._run(
            *munged, f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/seed"
        )
        self._wait((folder / "munge.socket").exists, START_DEADLINE, "munged did not make its socket")
        self._run("slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for node in NODES:
            mount = (
                f'mount --bind "{folder / node}" "{self.local}" && exec slurmd -D -N {node} -f "{folder}/slurm.conf"'
            )
            daemon = self._run("unshare", "--mount", "sh", "-c", mount)
            namespace = daemon.own_namespace(START_DEADLINE)
            if namespace is None:
                raise SlurmError(f"{node} got no mount namespace: {self._last_words()}")
            self._namespaces.add(namespace)
        self._wait(self._is_idle, START_DEADLINE, "the nodes did not become idle")

    def _run(self, *command: str) -> Daemon:
        daemon = Daemon(command, self._folder / "log" / f"{len(self._daemons)}.out", self._environment)
        self._daemons.append(daemon)
        return daemon

    def _is_idle(self) -> bool:
        with contextlib.suppress(SlurmError):
            return self._ask("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * len(NODES)
        return False

    def _wait(self, condition: Callable[[], bool], seconds: float, complaint: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise SlurmError(
                    f"{complaint} within {seconds:g} s; the last words of the daemons: {self._last_words()}"
                )
            time.sleep(POLL)

    def _last_words(self) -> str:
        logs = sorted((self._folder / "log").iterdir())
        lines = [(log.read_text(errors="replace").splitlines() or [""])[-1] for log in logs]
        return " | ".join(line for line in lines if line) or "none."

    def _ask(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Run a client of this cluster; returns what it printed."""
        try:
            done = subprocess.run(
                command,
                env={**self._environment, **(environment or {}), CONF: self._environment[CONF]},
                capture_output=True,
                text=True,
                timeout=START_DEADLINE,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SlurmError(f"{command[0]} did not answer within {START_DEADLINE:g} s.") from error
        if done.returncode != 0:
            raise SlurmError(f"{command[0]} said: {' '.join(done.stderr.split())}")
        return done.stdout


def _names() -> list[str]:
    """Return the names of all processes, those apart that have ended and nobody asked for."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes():
                found.append((process / "comm").read_text().strip())
    return found


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
