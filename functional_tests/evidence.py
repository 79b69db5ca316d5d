"""What is looked at when a life has ended: losses, content, cost, completeness, and what is left behind."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from case_jobs import Place
from cases import Case, Life
from checks import Check, same_content
from job_processes import remaining_processes
from jobs import Job
from trainers import Trainer

from megatron_ckpt_ext import latest_complete_step, verify_checkpoint
from megatron_ckpt_ext.events import Phase

__all__ = ["Evidence"]

LEFT_BY_TORCH = re.compile(r"torchelastic_\w+|torchinductor_\w+")
"""torchrun leaves the folder of its log files, and importing torch that of its compiler."""
LEFT_BY_KILLS = re.compile(rf"{LEFT_BY_TORCH.pattern}|pymp-\w+")
"""Python's multiprocessing removes its folder when a process ends, which SIGKILL does not let it."""
SAID = {"rebuild": Phase.REBUILD, "fallback": Phase.FALLBACK}
"""Beginning of a kind of save -> event that says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One life that has ended, and what it is compared with."""

    case: Case
    life: Life
    job: Job
    reference: Job
    trainer: Trainer
    place: Place

    @property
    def directory(self) -> Path:
        """Where its checkpoints are."""
        return self.life.directory(self.place.variables)

    def checks(self) -> Iterator[Check]:
        """Look at everything."""
        yield self.losses()
        for step, kind in self.life.saves.items():
            yield from self.content(step)
            yield self.cost(step, kind)
        yield self.decisions()
        yield self.newest()
        yield self.files() if self.life.killed_in is None else self.killed(self.life.killed_in)
        yield self.processes()
        if self.case.node_local:
            yield self.prepared_on_every_node()

    def losses(self) -> Check:
        """Compare with the reference, from the step behind the one that it resumed from."""
        found, expected = self.trainer.losses(self.job), self.trainer.losses(self.reference)
        wrong = [step for step, loss in found.items() if expected.get(step) != loss]
        steps = range(self.life.resumes + 1, max(self.life.saves) + 1)
        return Check(
            claim=f"losses of steps {steps[0]} to {steps[-1]} equal the reference's",
            holds=not wrong and min(found, default=None) == steps[0] and found.keys() >= set(steps),
            found=f"{len(found) - len(wrong)} of {len(found)} from step {min(found, default=None)} on",
        )

    def content(self, step: int) -> Iterator[Check]:
        """Read a checkpoint with plain torch, and let it be judged."""
        checkpoint = self.trainer.checkpoint(self.directory, step)
        report = verify_checkpoint(str(checkpoint))
        yield Check(claim=f"step {step} is complete", holds=report.complete, found=f"{report.problems or 'it is'}")
        if report.complete:
            compared = self.trainer.differences(checkpoint, step, self.job, self.life.ranks, self.reference)
            yield same_content(f"step {step} is the same bit for bit", *compared)

    def cost(self, step: int, kind: str) -> Check:
        """Compare the collectives of a save with the table."""
        counts: dict[str, int] = {}
        for event in self.job.events:
            if event.rank == 0 and event.step == step:
                for name, calls in event.collectives.items():
                    counts[name] = counts.get(name, 0) + calls
        polls = counts.pop("all_reduce", 0)
        own = {} if kind.startswith("fallback") else self.trainer.own_collectives  # synchronous saves have it counted
        expected = dict(Counter(self.case.collectives[kind]) + Counter(own))
        return Check(
            claim=f"step {step} costs what {kind} may cost: {expected or 'no collective'} and polls",
            holds=counts == expected and polls > 0,  # without a poll nobody was looking
            found=f"{counts or 'no collective'} and {polls} polls",
        )

    def decisions(self) -> Check:
        """Whether the saves that were rebuilt or fell back are those that should have, and said why."""
        expected = {
            (step, phase)
            for step, kind in self.life.saves.items()
            for word, phase in SAID.items()
            if kind.startswith(word)
        }
        said = [event for event in self.job.events if event.phase in SAID.values()]
        found = {(event.step, event.phase) for event in said}
        return Check(
            claim="rebuilds and fallbacks are those expected, and the events say why",
            holds=found == expected and all(event.reason for event in said),
            found=f"{sorted((step, str(phase)) for step, phase in found) or 'none'}",
        )

    def newest(self) -> Check:
        """Ask which step a job would resume from."""
        step, last = latest_complete_step(str(self.directory)).step, max(self.life.saves)
        return Check(claim=f"{last} is the newest complete step", holds=step == last, found=f"{step}")

    def killed(self, step: int) -> Check:
        """Whether the kill came while a step was being written."""
        checkpoint = self.trainer.checkpoint(self.directory, step)
        sizes = {path.name: path.stat().st_size for path in checkpoint.glob("*")}
        return Check(
            claim=f"it was killed in the middle of writing step {step}",
            holds=".metadata" not in sizes and sum(sizes.values()) > 0,
            found=f"{sum(sizes.values())} bytes in {len(sizes)} files",
        )

    def files(self) -> Check:
        """Look for temporary files; after a kill that is for the next job, which cleans them."""
        folders = (self.place.output, self.place.local, *self.place.behind_local)
        found = [*self.directory.rglob("*.tmp"), *(path for folder in folders for path in folder.glob("*.tmp"))]
        expected = LEFT_BY_KILLS if any(life.killed_in for life in self.case.lives) else LEFT_BY_TORCH
        found += [path for path in self.place.temporary.iterdir() if not expected.fullmatch(path.name)]
        return Check(
            claim="no temporary file is left",
            holds=not found,
            found=f"{[path.name for path in found] or 'none'}",
        )

    def processes(self) -> Check:
        """Look for processes that have outlived the job."""
        left = remaining_processes(self.job.folder)
        return Check(claim="no process is left", holds=not left, found=f"{left or 'none'}")

    def prepared_on_every_node(self) -> Check:
        """Look behind the node-local directory of each node."""
        files = [folder / "prepared.metadata" for folder in self.place.behind_local]
        contents = {file.read_bytes() if file.exists() else None for file in files}
        return Check(
            claim="every node has the same prepared file",
            holds=len(files) > 1 and len(contents) == 1 and None not in contents,
            found=f"{sum(file.exists() for file in files)} of {len(files)} nodes have one",
        )
