"""Running the lives of a case, one after the other, and the stock jobs that they are compared with."""

import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml
from cases import Case, Life
from job_processes import MARK, KillerOfRanks
from jobs import Job, Launch, on_this_machine, run_job
from nvrx_stand_ins import WITHOUT_NVRX
from trainers import Trainer

__all__ = ["Place", "References", "run_life"]

KILLED = 128 + 9
"""Exit code of a job whose ranks SIGKILL ended, as a shell gives it."""
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a case runs."""

    output: Path
    """Of all jobs of the case."""
    local: Path
    """Storage of each node for itself, as its jobs see it; on one machine a folder like any other."""
    temporary: Path
    """Where every process makes its temporary files; sockets among them, whose paths must be short."""
    behind_local: tuple[Path, ...] = ()
    """``local`` of each node, as seen from outside of its jobs; empty on one machine."""
    launch: Launch = on_this_machine
    """How jobs are started."""
    timeout: float = 240.0
    """Of a job, in seconds."""

    @property
    def variables(self) -> dict[str, str]:
        """What the case's files refer to."""
        return {
            "OUTPUT_PATH": str(self.output),
            "CHECKPOINT_SAVE_PATH": str(self.output / "checkpoints"),
            "NODE_LOCAL_PATH": str(self.local),
        }

    def environment(self, name: str) -> dict[str, str]:
        """Return the variables of one job's processes."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        return {
            **self.variables,
            **CPU_ONLY,
            MARK: str(self.output / name),
            "TMPDIR": str(self.temporary),
            "OUTPUT": str(self.output),
        }


def run_life(case: Case, life: Life, trainer: Trainer, place: Place) -> Job:
    """Run one life to its end.

    Raises:
        JobFailedError: it did not end as it should.
    """
    checkpoints = life.directory(place.variables)
    if life.rewound:
        rewind(checkpoints, life.resumes, trainer)
    folder = place.output / life.name
    with ExitStack() as stack:
        if life.killed_in is not None:
            written = trainer.checkpoint(checkpoints, life.killed_in)
            stack.enter_context(KillerOfRanks(folder, lambda: _is_being_written(written)))
        return run_job(
            life.name,
            (*trainer.machine, *life.expanded(place.variables), *trainer.recorded(folder)),
            output=place.output,
            recipe=case.config,
            script=trainer.script,
            ranks=life.ranks,
            environment=place.environment(life.name),
            sitecustomize=WITHOUT_NVRX if case.without_nvrx else "",
            emulated=trainer.emulated,
            exit_code=0 if life.killed_in is None else KILLED,
            timeout=place.timeout,
            launch=place.launch,
        )


def rewind(checkpoints: Path, step: int, trainer: Trainer) -> None:
    """Remove what is newer than a step and let the tracker say that step."""
    kept = trainer.checkpoint(checkpoints, step)
    for newer in checkpoints.glob("iter_*"):
        if newer.name > kept.name:
            shutil.rmtree(newer)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(step))


def _is_being_written(checkpoint: Path) -> bool:
    """Whether data is there and ``.metadata`` is not."""
    try:
        with os.scandir(checkpoint) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries}
    except FileNotFoundError:
        return False
    return ".metadata" not in sizes and any(size for name, size in sizes.items() if name.endswith(".distcp"))


class References:
    """The stock jobs that lives are compared with; each is run once, on this machine.

    Args:
        output: folder for all of them.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._jobs: dict[str, Job] = {}
        self._started = 0

    def of(self, case: Case, life: Life, trainer: Trainer, place: Place) -> Job:
        """Run the reference of a life, unless one with the same arguments has run.

        Raises:
            JobFailedError: it did not end as it should.
        """
        start = self._start(life, place)
        words = _without(life.expanded(place.variables), trainer.not_in_reference)
        arguments = yaml.safe_load(case.config.read_text())["MODEL_ARGS"]
        trained = {flag: value for flag, value in arguments.items() if flag not in trainer.not_in_reference}
        key = yaml.safe_dump([trained, life.ranks, words, str(start)])
        if key not in self._jobs:
            self._jobs[key] = self._run(case, life, trainer, place, words, start)
        return self._jobs[key]

    def _start(self, life: Life, place: Place) -> Path | None:
        """Copy the checkpoints that a life resumes from, before it adds its own."""
        if life.reference == "uninterrupted":
            return None
        start = place.output / f"start of {life.name}"
        shutil.copytree(life.directory(place.variables), start)
        return start

    def _run(
        self, case: Case, life: Life, trainer: Trainer, place: Place, words: Sequence[str], start: Path | None
    ) -> Job:
        self._started += 1
        name = f"reference {self._started}"
        return run_job(
            name,
            (*trainer.machine, *words, *trainer.reference_words(self._output / name, start)),
            output=self._output,
            recipe=case.config,
            without=trainer.not_in_reference,
            script=trainer.script,
            ranks=life.ranks,
            environment=place.environment(name) | {MARK: str(self._output / name)},
            emulated=trainer.emulated,
            stock=trainer.stock,
            timeout=place.timeout,
        )


def _without(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """Leave flags, each with its one value, out of a command line."""
    skipped = {at + behind for at, word in enumerate(words) if word in flags for behind in (0, 1)}
    return [word for at, word in enumerate(words) if at not in skipped]
