"""``make demo-manager``: a plain FSDP2 trainer with ``CheckpointManager``, on two CPU ranks.

``recipes/fsdp2_trainer.py`` trains once without a stop and with synchronous saves; then with asynchronous ones, is
killed in the middle of a write, and resumes. A table compares what the saves cost, then come the checks that a user
would ask for. Exit code 1 if any of them is false.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from checks import Check, run_demo, same_content  # noqa: E402  (needs the path set above)
from compare import differences_of_checkpoints  # noqa: E402
from jobs import ROOT, JobFailedError  # noqa: E402
from rich.table import Table  # noqa: E402

from megatron_ckpt_ext import latest_complete_step  # noqa: E402
from megatron_ckpt_ext.events import Event, Phase, read_events  # noqa: E402
from megatron_ckpt_ext.publish.steps import StepPaths  # noqa: E402

RANKS, STEPS, INTERVAL, KEEP = 2, 30, 6, 2
COMPLETE, KILLED = INTERVAL, 2 * INTERVAL
"""The first save is complete when the job is killed in the second one."""
MODEL = ("--width", "384", "--layers", "6", "--batch-size", "16")
DEADLINE = 120.0
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One life of the trainer."""

    name: str
    """Also of its folder."""
    folder: Path
    """Its log, losses and events."""
    directory: Path
    """Of the checkpoints."""

    @property
    def log(self) -> str:
        """What it printed."""
        return (self.folder / "log").read_text(errors="replace")

    @property
    def events(self) -> list[Event]:
        """Of all ranks."""
        return read_events(str(self.folder / "events"))

    @property
    def lines(self) -> list[tuple[int, str, float]]:
        """Step, exact loss and seconds of each step."""
        lines = (self.folder / "losses").read_text().splitlines()
        return [(int(step), loss, float(seconds)) for step, loss, seconds in map(str.split, lines)]

    @property
    def losses(self) -> dict[int, str]:
        """Step -> loss in hexadecimal."""
        return {step: loss for step, loss, _ in self.lines}

    @property
    def seconds(self) -> dict[int, float]:
        """Step -> seconds of rank 0, its save included."""
        return {step: seconds for step, _, seconds in self.lines}

    @property
    def saves(self) -> list[int]:
        """Steps that were saved."""
        return [step for step in self.seconds if step % INTERVAL == 0]

    def phase(self, phase: Phase, steps: Sequence[int]) -> list[float]:
        """Return the seconds of the slowest rank in a phase, by save."""
        found = [[e.seconds for e in self.events if e.phase is phase and e.step == step] for step in steps]
        return [max(seconds) for seconds in found if seconds]


def start(run: Run, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start a life of the trainer."""
    run.folder.mkdir()
    words = (
        *("--directory", str(run.directory), "--losses", str(run.folder / "losses"), "--steps", str(STEPS)),
        *("--save-interval", str(INTERVAL), "--ckpt.events", str(run.folder / "events"), *MODEL, *arguments),
        *("--ckpt.keep-last", str(KEEP)),
    )
    command = [sys.executable, "-W", "ignore", "-m", "megatron_ckpt_ext.cli.main", "run", "--nproc", str(RANKS)]
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with open(run.folder / "log", "w") as log:
        return subprocess.Popen(
            [*command, str(ROOT / "recipes" / "fsdp2_trainer.py"), *words],
            env={**os.environ, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(run: Run, process: "subprocess.Popen[bytes]", *, killed: bool = False) -> None:
    """Wait for the end.

    Raises:
        JobFailedError: with the end of the log.
    """
    try:
        code: int | str = process.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        code = f"none within {DEADLINE:g} s"
    if (code != 0) is not killed:
        raise JobFailedError(f"the {run.name} job ended with exit code {code}; its log ends:\n{run.log[-4000:]}")


def kill_while_writing(run: Run, process: "subprocess.Popen[bytes]") -> None:
    """Send SIGKILL to all ranks as soon as the first MiB of step ``KILLED`` is in its file."""
    file = run.directory / f"step_{KILLED}" / "__0_0.distcp"
    deadline = time.monotonic() + DEADLINE
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_size >= MIB:
                break
        time.sleep(0.001)
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        for rank in (thread / "children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(rank), signal.SIGKILL)


def run_all(output: Path, say: Callable[[str], None]) -> tuple[Table, list[Check]]:
    """Run every life; returns what to print."""

    def run(name: str, directory: str) -> Run:
        return Run(name=name, folder=output / name, directory=output / directory)

    reference, killed, resumed = run("sync", "sync steps"), run("killed", "steps"), run("resumed", "steps")
    say(f"job 1: {STEPS} steps on {RANKS} ranks without a stop, synchronous saves every {INTERVAL}")
    finish(reference, start(reference))
    say(f"job 2: the same with asynchronous saves, killed while step {KILLED} is being written")
    process = start(killed, "--ckpt.async-save")
    kill_while_writing(killed, process)
    finish(killed, process, killed=True)
    between = list(checks_of_the_kill(killed))
    say("job 3: the command of job 2 again")
    finish(resumed, start(resumed, "--ckpt.async-save"))
    return cost_table(reference, resumed), [*between, *checks(reference, killed, resumed)]


def checks_of_the_kill(killed: Run) -> Iterator[Check]:
    """Look at what the killed job has left."""
    whole, part = (_sizes(killed.directory / f"step_{step}") for step in (COMPLETE, KILLED))
    yield Check(
        claim=f"job 2 was killed in the middle of writing step {KILLED}",
        holds=".metadata" not in part and 0 < sum(part.values()) < sum(whole.values()) - whole[".metadata"],
        found=f"{sum(part.values()) / MIB:.0f} of {sum(whole.values()) / MIB:.0f} MiB were written",
    )
    newest = latest_complete_step(killed.directory).step
    yield Check(claim=f"step {COMPLETE} is the newest complete one", holds=newest == COMPLETE, found=f"{newest}")


def checks(reference: Run, killed: Run, resumed: Run) -> Iterator[Check]:
    """Look at what the resumed job has done."""
    told = [line for line in resumed.log.splitlines() if f"step_{KILLED} is passed over" in line]
    yield Check(
        claim=f"job 3 goes on behind step {COMPLETE} and tells why not behind {KILLED}",
        holds=min(resumed.losses) == COMPLETE + 1 and len(told) == 1,
        found=told[0].partition("passed over: ")[2] if told else "nothing was told",
    )
    for run in (killed, resumed):
        wrong = [step for step, loss in run.losses.items() if loss != reference.losses[step]]
        yield Check(
            claim=f"the losses of the {run.name} job equal those of job 1, exactly",
            holds=not wrong and max(resumed.losses) == STEPS,
            found=f"{len(run.losses) - len(wrong)} of {len(run.losses)} equal",
        )
    newest = latest_complete_step(resumed.directory)
    yield Check(
        claim=f"the newest step, {STEPS}, is complete",
        holds=newest.step == STEPS and not newest.skipped,
        found=f"{newest.step}",
    )
    both = [run.directory / f"step_{STEPS}" for run in (reference, resumed)]
    yield same_content(f"step {STEPS} has one content in jobs 1 and 3", *differences_of_checkpoints(*both))
    kept = StepPaths(str(resumed.directory)).steps()
    yield Check(
        claim=f"the last {KEEP} steps are kept", holds=kept == (STEPS - INTERVAL, STEPS), found=f"{[*kept]} are there"
    )
    temporary = [path.name for run in (reference, resumed) for path in run.directory.rglob("*.tmp")]
    yield Check(claim="no temporary file is left", holds=not temporary, found=f"{temporary or 'none'}")


def cost_table(reference: Run, resumed: Run) -> Table:
    """Build the table of what saves cost."""
    table = Table(title="What saves cost: ms of the slowest rank (steps: of rank 0), medians; MiB a rank")
    columns = ("other steps", "step at a save", "step after", "save()", "fence wait", "durable after", "MiB")
    for column in ("saves", *columns):
        table.add_column(column, justify="left" if column == "saves" else "right")
    for name, run in (("sync", reference), ("async", resumed)):
        first, *later = run.saves
        table.add_row(f"{name}, first", *_costs(run, [first]))
        table.add_row(f"{name}, later", *_costs(run, later), end_section=True)
    return table


def _costs(run: Run, saves: Sequence[int]) -> list[str]:
    beside = {*run.saves, *(step + 1 for step in run.saves), min(run.seconds)}
    staged = run.phase(Phase.STAGE, saves)
    durable = run.phase(Phase.PUBLISH, saves)
    return [
        _ms([seconds for step, seconds in run.seconds.items() if step not in beside]),
        _ms([run.seconds[step] for step in saves]),
        _ms([run.seconds[step + 1] for step in saves if step < STEPS]),
        _ms(staged or durable),
        _ms(run.phase(Phase.FENCE, saves)),
        _ms(durable),
        f"{sum(_sizes(run.directory / f'step_{STEPS}').values()) / RANKS / MIB:.0f}",
    ]


def _ms(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    value = 1000 * statistics.median(seconds)
    return f"{value:.0f}" if value >= 10 else f"{value:.3f}"


def _sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.iterdir()} if directory.exists() else {}


if __name__ == "__main__":
    sys.exit(run_demo(__doc__, run_all, width=118))
