"""``recipes/fsdp2_trainer.py``, killed in each phase of a save and started again, all in forks of one process.

Imports cost seconds a process, so ``python killed_trainer.py FOLDER`` imports once and forks a child for each life.
Faults come in at seams of the interpreter and the kernel: a copy of an object in the state dict, the audit events of
file operations, and the largest size of a file.
"""

import argparse
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  (the path is set above)

from megatron_ckpt_ext import CheckpointManager, ManagerConfig, latest_complete_step  # noqa: E402
from recipes.fsdp2_trainer import Training, parser, start, train  # noqa: E402

STEPS, INTERVAL = 8, 2
FIRST, KILLED = 2, 4
"""Steps of the first two saves; each fault is in the second one, which removes the first."""
FILES = 2
REFERENCE = "reference"
DEADLINE = 60.0


class Phase(StrEnum):
    """Where the process is killed, in the order of a save."""

    STAGING = "staging"
    WRITING = "writing"
    WRITTEN = "written, not published"
    PUBLISHED = "published, nothing removed"
    REMOVING = "removing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lived:
    """How a life ended and what it left; plain data."""

    exit_code: int | None
    newest: int | None
    """Newest complete step."""
    files: dict[str, int]
    """Path below the directory of the checkpoints -> bytes."""


class Bait:
    """An object in the state dict. Calls ``trap`` when it is copied for a save."""

    def __init__(self, trap: Callable[[], None] | None) -> None:
        self._trap = trap

    def __deepcopy__(self, _memo: Any) -> "Bait":
        if self._trap is not None:
            self._trap()
        return Bait(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("bait",)


class BaitedTraining(Training):
    """Has a bait in what it saves as step ``KILLED``."""

    def __init__(self, options: argparse.Namespace, device: torch.device, trap: Callable[[], None] | None) -> None:
        super().__init__(options, device)
        self._trap = trap

    def state_dict(self) -> dict[str, Any]:
        armed = self.schedule.last_epoch == KILLED
        return {**super().state_dict(), "bait": Bait(self._trap if armed else None)}


class Witness:
    """Hears of each file that appears or goes, before it does: notes the newest complete step, and may kill."""

    def __init__(self, folder: Path, phase: Phase | None) -> None:
        self._directory = folder / "checkpoints"
        self._moments = os.open(folder / "moments", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._fired = folder / "fired"
        self._phase = phase
        self._removed: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("os.rename", "os.remove", "os.rmdir") or not self._directory.exists():
            return
        path = Path(str(arguments[1] if event == "os.rename" else arguments[0]))
        newest = latest_complete_step(self._directory).step
        os.write(self._moments, (json.dumps([event, path.name, newest]) + "\n").encode())
        if event == "os.rename" and path == self._directory / f"step_{KILLED}" / ".metadata":
            self._reach(Phase.WRITTEN)
        elif event == "os.remove" and newest == KILLED:
            self._reach(Phase.PUBLISHED)
            self._removed.append(path.suffix)
            if self._removed.count(".distcp") == FILES:
                self._reach(Phase.REMOVING)

    def trap(self) -> None:
        """What happens when the state of step ``KILLED`` is copied."""
        self._reach(Phase.STAGING)
        if self._phase is Phase.WRITING:
            # The kernel ends the process in the middle of the first file: SIGXFSZ, which Python ignores by default.
            size = (self._directory / f"step_{FIRST}" / "__0_0.distcp").stat().st_size
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
            self._fired.touch()

    def _reach(self, phase: Phase) -> None:
        if phase is self._phase:
            self._fired.touch()
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(DEADLINE)  # the signal may reach another thread first


def live(folder: Path, phase: Phase | None) -> None:
    """Train to the end, or until killed."""
    logging.basicConfig(filename=folder / "log", format="%(levelname)s %(message)s", force=True)
    torch.set_num_threads(1)
    witness = Witness(folder, phase)
    sys.addaudithook(witness)
    words = ["--directory", str(folder / "checkpoints"), "--losses", str(folder / "losses"), "--steps", str(STEPS)]
    words += ["--save-interval", str(INTERVAL), "--width", "16", "--layers", "2", "--batch-size", "4"]
    words += ["--ckpt.async-save", "--ckpt.keep-last", "1", "--ckpt.files-per-rank", str(FILES)]
    options = parser().parse_args(words)
    training = BaitedTraining(options, start(), witness.trap)
    with CheckpointManager(options.directory, config=ManagerConfig.from_args(options)) as manager:
        train(training, manager, options)


def lives(folder: Path, phases: dict[str, Phase | None]) -> dict[str, dict[str, Any]]:
    """Run a life in each subfolder, side by side; return its ``Lived`` by name."""
    fork = multiprocessing.get_context("fork")
    running = {name: fork.Process(target=live, args=(folder / name, phase)) for name, phase in phases.items()}
    for process in running.values():
        process.start()
    found = {}
    for name, process in running.items():
        process.join(DEADLINE)
        if process.is_alive():
            process.kill()
        directory = folder / name / "checkpoints"
        files = {
            str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*") if path.is_file()
        }
        newest = latest_complete_step(directory).step
        found[name] = asdict(Lived(exit_code=process.exitcode, newest=newest, files=files))
    return found


def main(folder: Path) -> None:
    """Write ``lives.json``: how the first and the second life of each cell ended. The reference has one life only."""
    names: dict[str, Phase | None] = {REFERENCE: None, **{phase.name: phase for phase in Phase}}
    for name in names:
        (folder / name).mkdir()
    first = lives(folder, names)
    for phase in Phase:  # the log of the second life is asked what was skipped, its losses where it went on
        (folder / phase.name / "losses").rename(folder / phase.name / "first losses")
    second = lives(folder, {phase.name: None for phase in Phase})
    (folder / "lives.json").write_text(json.dumps([first, second]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
