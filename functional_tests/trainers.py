"""What a case runs, and how its losses and checkpoints are read: Megatron's training loop, and the FSDP2 trainer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import yaml
from cases import CPU_ARGUMENTS, Case
from compare import differences_from_dcp, differences_of_checkpoints
from jobs import ROOT, SAVING, STATE_DUMP, Job, megatron_version, unknown_flags
from packaging.version import Version
from shard_dump import differences_from_memory

from megatron_ckpt_ext.cli.recipe import read_recipe

__all__ = ["Trainer", "trainer_of"]


class Trainer(Protocol):
    """What differs between the models of cases."""

    script: Path
    """What each rank runs."""
    emulated: bool
    """Whether CUDA names act on the CPU."""
    stock: bool
    """Whether a reference runs with every name of Megatron's put back."""
    machine: tuple[str, ...]
    """Arguments of every job on this kind of machine."""

    def recorded(self, folder: Path) -> tuple[str, ...]:
        """Return the arguments with which a job keeps in its folder what it does."""

    own_collectives: Mapping[str, int]
    """What it adds to every save itself."""
    not_in_reference: tuple[str, ...]
    """Flags of the case that a reference leaves out."""

    def reference_words(self, folder: Path, start: Path | None) -> tuple[str, ...]:
        """Return the last arguments of a reference: where it saves, if it does, and what it resumes from."""

    def losses(self, job: Job) -> Mapping[int, object]:
        """Return step -> exact loss."""

    def checkpoint(self, directory: Path, step: int) -> Path:
        """Return the checkpoint of a step."""

    def differences(self, checkpoint: Path, step: int, job: Job, ranks: int, reference: Job) -> tuple[int, list[str]]:
        """Compare what plain torch reads with what it should be; returns the number of items and what differs."""


class Megatron:
    """Megatron's training loop; its ranks keep what they save, and that is what a checkpoint has to give back."""

    script = STATE_DUMP
    emulated = stock = True
    not_in_reference: tuple[str, ...] = ("--ckpt-metadata", "--ckpt-metadata-create", *SAVING)

    def __init__(self, *, fsdp: bool) -> None:
        self._compare = differences_from_memory if fsdp else differences_from_dcp
        # "Wait so everyone is done (not necessary)", says Megatron before 0.19 at the end of a save.
        self.own_collectives: Mapping[str, int] = {"barrier": 1} if megatron_version() < Version("0.19") else {}
        words = read_recipe(CPU_ARGUMENTS, resume=False, environment={}).arguments
        self.machine = tuple(word for word in words if word not in unknown_flags())

    def recorded(self, folder: Path) -> tuple[str, ...]:
        """Return where the events go; ``state_dump`` keeps the rest."""
        return ("--ckpt-events", str(folder / "events"))

    def reference_words(self, folder: Path, start: Path | None) -> tuple[str, ...]:
        """Save nothing: stock saves of ``fsdp_dtensor`` never return on these ranks.

        Where nothing is resumed, --load names an empty folder, as in the jobs of the cases: before 0.19 Megatron-FSDP
        trains differently with it.
        """
        return ("--load", str(start or folder / "nothing"))

    def losses(self, job: Job) -> Mapping[int, object]:
        """Return what the last rank kept."""
        return job.losses

    def checkpoint(self, directory: Path, step: int) -> Path:
        """Return ``iter_N``."""
        return directory / f"iter_{step:07d}"

    def differences(self, checkpoint: Path, step: int, job: Job, ranks: int, reference: Job) -> tuple[int, list[str]]:
        """Compare with the memory of the ranks that saved it."""
        return self._compare(checkpoint, job.dump, step, ranks=ranks)


class Fsdp2:
    """The plain FSDP2 trainer; a checkpoint has to hold what the synchronous one of an uninterrupted job holds."""

    script = ROOT / "recipes" / "fsdp2_trainer.py"
    emulated = stock = False
    own_collectives: Mapping[str, int] = {}
    machine: tuple[str, ...] = ()
    not_in_reference: tuple[str, ...] = ("--ckpt.async-save", "--ckpt.keep-last")

    def recorded(self, folder: Path) -> tuple[str, ...]:
        """Return where losses and events go."""
        return ("--losses", str(folder / "losses"), "--ckpt.events", str(folder / "events"))

    def reference_words(self, folder: Path, start: Path | None) -> tuple[str, ...]:
        """Save synchronously, and keep every step, in a directory of its own."""
        return ("--directory", str(folder / "steps"), "--losses", str(folder / "losses"))

    def losses(self, job: Job) -> Mapping[int, object]:
        """Return what rank 0 kept."""
        lines = (job.folder / "losses").read_text().splitlines()
        return {int(step): loss for step, loss, _ in map(str.split, lines)}

    def checkpoint(self, directory: Path, step: int) -> Path:
        """Return ``step_N``."""
        return directory / f"step_{step}"

    def differences(self, checkpoint: Path, step: int, job: Job, ranks: int, reference: Job) -> tuple[int, list[str]]:
        """Compare with the reference's checkpoint."""
        return differences_of_checkpoints(checkpoint, self.checkpoint(reference.folder / "steps", step))


def trainer_of(case: Case) -> Trainer:
    """Choose by the model of a case."""
    if case.model == "fsdp2":
        return Fsdp2()
    return Megatron(fsdp=yaml.safe_load(case.config.read_text())["MODEL_ARGS"]["--ckpt-format"] == "fsdp_dtensor")
