"""What the demos share: claims with what was found, the table of what saves cost, and running it all in a folder."""

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from jobs import Job, save_costs
from rich.console import Console
from rich.table import Table

__all__ = ["Check", "cost_table", "equal_losses", "run_demo", "same_content"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One claim of a demo and whether it held."""

    claim: str
    """What should be true."""
    holds: bool
    """Whether it was."""
    found: str
    """What was found."""


def same_content(claim: str, compared: int, different: list[str]) -> Check:
    """Claim that nothing differs, and that something was compared."""
    found = f"{compared} items compared" if not different else f"{len(different)} of {compared} differ: {different[:3]}"
    return Check(claim=claim, holds=compared > 0 and not different, found=found)


def equal_losses(claim: str, job: Job, reference: Job, steps: range) -> Check:
    """Claim that a job had the losses of the reference in all of these iterations, exactly."""
    losses, expected = job.losses, reference.losses
    wrong = [step for step in steps if step not in losses or losses[step] != expected[step]]
    return Check(claim=claim, holds=not wrong, found=f"{len(steps) - len(wrong)} of {len(steps)} equal")


def cost_table(jobs: Iterable[Job]) -> Table:
    """Build the table of what each save cost."""
    table = Table(title="What each save cost the training thread")
    for column in ("job", "step", "object collectives", "other collectives", "blocking ms"):
        table.add_column(column, justify="left" if column == "job" else "right")
    for job in jobs:
        for cost in save_costs(job):
            sums = cost.collectives
            table.add_row(job.name, str(cost.step), str(sums.objects), str(sums.others), f"{cost.blocking_ms:.0f}")
        table.add_section()
    return table


def run_demo(
    description: str | None,
    run: Callable[[Path, Callable[[str], None]], tuple[Table, Iterable[Check]]],
    *,
    width: int | None = None,
) -> int:
    """Run a demo in a folder, print its table and its checks; returns the exit code.

    Args:
        description: for ``--help``.
        run: runs every job in a folder, says what it does, and returns what is to be printed.
        width: of the output, in characters.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep checkpoints, logs and events here")
    options = parser.parse_args()
    console = Console(width=width)
    output = options.keep or Path(tempfile.mkdtemp(prefix="megatron-ckpt-demo-"))
    output.mkdir(parents=True, exist_ok=True)
    try:
        table, checks = run(output, console.print)
        console.print(table)
        results = list(checks)
    finally:
        if options.keep is None:
            shutil.rmtree(output, ignore_errors=True)
    for check in results:
        mark = "[green]yes[/green]" if check.holds else "[bold red]NO[/bold red]"
        console.print(f"{mark}  {check.claim}: {check.found}", highlight=False)
    return 0 if all(check.holds for check in results) else 1
