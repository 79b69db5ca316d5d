"""``python benchmarks/manager.py``: what asynchronous saves of ``CheckpointManager`` cost a trainer, on gloo ranks.

Warm saves, a plain copy of the same bytes into memory that is there already, and synchronous saves, in turn; a time is
that of the slowest rank, and a ratio compares what belongs to one round. The first save of the job, which allocates
host memory and makes groups, stands apart. CPU state only: with a GPU the copies run beside the training, and
``tools/gpu_check.py`` measures them.

Host memory is what staging adds to the private memory of a rank, against the bytes that it staged. Beside it stands
what the whole first asynchronous save adds, once it is durable and at its peak, and the peak of a synchronous save,
which stages nothing: torch's writer takes memory for itself, which the allocator keeps for the writer thread. It was
up to 120 MiB, whether 128 or 512 MiB were saved.

The slow writer: the state has an object whose pickling sleeps (it does not compute, like storage that answers late),
so that a write lasts for three training steps or more. The steps in that time are compared with those right before the
save; a step is products of matrices and one small all_reduce.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ranks import RankPool  # noqa: E402  (the path is set above)
from report import Limit, Spread, add_output_arguments, publish  # noqa: E402
from rich.table import Table  # noqa: E402

if TYPE_CHECKING:
    from manager_on_ranks import Found, Round, SlowRound

COPY_LIMIT, MEMORY_LIMIT, STEP_LIMIT, SLOW_STEPS = 1.3, 1.1, 1.1, 3
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was found with one number of ranks."""

    ranks: int
    found: "Sequence[Found]"
    """By rank."""

    def seconds(self, of: "Callable[[Round], float]") -> list[float]:
        """Return a time of the slowest rank, by round."""
        return [max(map(of, rounds)) for rounds in zip(*(each.rounds for each in self.found), strict=True)]

    def slow(self, of: "Callable[[SlowRound], float]") -> Spread:
        """Return something about the slow writer, of the rank with the largest value."""
        return Spread.of([max(map(of, rounds)) for rounds in zip(*(each.slow for each in self.found), strict=True)])

    @property
    def copy_ratio(self) -> Spread:
        """Warm save against copy, round by round."""
        saved, copied = (self.seconds(lambda each: each.save), self.seconds(lambda each: each.copy))
        return Spread.of([save / copy for save, copy in zip(saved, copied, strict=True)])

    @property
    def memory_ratio(self) -> Spread:
        """Host memory of staging against staged bytes, over ranks."""
        return Spread.of([each.staging / each.staged for each in self.found])


def measure(ranks: int, pool: RankPool, options: argparse.Namespace) -> Measured:
    """Save on ``ranks`` real ranks."""
    from manager_on_ranks import save_on_rank

    directory = tempfile.mkdtemp(prefix="manager-", dir=options.directory)
    try:
        found = pool.run(
            save_on_rank,
            options.tensors,
            options.elements,
            options.repetitions,
            SLOW_STEPS,
            directory,
            world_size=ranks,
            timeout=400.0,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return Measured(ranks=ranks, found=found)


def time_table(measured: Sequence[Measured]) -> Table:
    """Build the table of times."""
    size = measured[0].found[0].staged / MIB
    table = Table(title=f"One save of {size:.0f} MiB a rank, ms of the trainer: median (quartiles)")
    for column in (
        "ranks",
        "first save()",
        "copy",
        "warm save()",
        "save() / copy",
        "durable after",
        "synchronous save",
    ):
        table.add_column(column, justify="right")
    for each in measured:
        first = max(found.first for found in each.found)
        copied, saved, durable, synchronous = (
            str(Spread.of(each.seconds(of)).times(1000))
            for of in (
                lambda one: one.copy,
                lambda one: one.save,
                lambda one: one.durable,
                lambda one: one.synchronous,
            )
        )
        table.add_row(str(each.ranks), f"{1000 * first:.0f}", copied, saved, str(each.copy_ratio), durable, synchronous)
    return table


def memory_table(measured: Sequence[Measured]) -> Table:
    """Build the table of host memory."""
    table = Table(title="Host memory that is added to a rank, MiB: median (quartiles) over ranks")
    for column in ("ranks", "staged", "staging", "staging / staged", "first save", "its peak", "peak of a sync save"):
        table.add_column(column, justify="right")
    for each in measured:
        staged, staging, stays, peak, synchronous = (
            str(Spread.of([getattr(found, of) / MIB for found in each.found]))
            for of in ("staged", "staging", "stays", "peak", "synchronous_peak")
        )
        table.add_row(str(each.ranks), staged, staging, str(each.memory_ratio), stays, peak, synchronous)
    return table


def slow_table(measured: Sequence[Measured]) -> Table:
    """Build the table of the slow writer."""
    table = Table(title=f"A writer that sleeps for {SLOW_STEPS} steps, ms: median (quartiles)")
    for column in ("ranks", "step before", "save()", "step while it writes", "while / before", "write, steps"):
        table.add_column(column, justify="right")
    for each in measured:
        table.add_row(
            str(each.ranks),
            str(each.slow(lambda one: one.before).times(1000)),
            str(each.slow(lambda one: one.save).times(1000)),
            str(each.slow(lambda one: one.during).times(1000)),
            str(each.slow(lambda one: one.during / one.before)),
            str(each.slow(lambda one: one.written / one.before)),
        )
    return table


def limits_of(each: Measured) -> list[Limit]:
    """Return what has to be shown with this number of ranks."""
    name = f"{each.ranks} rank{'s' if each.ranks > 1 else ''}: "
    return [
        Limit(what=f"{name}warm save() / copy of the same bytes", value=each.copy_ratio, bound=COPY_LIMIT),
        Limit(what=f"{name}host memory of staging / staged bytes", value=each.memory_ratio, bound=MEMORY_LIMIT),
        Limit(
            what=f"{name}step while the writer sleeps / step before",
            value=each.slow(lambda one: one.during / one.before),
            bound=STEP_LIMIT,
        ),
        Limit(
            what=f"{name}steps that the slow write takes",
            value=each.slow(lambda one: one.written / one.before),
            bound=SLOW_STEPS,
            at_least=True,
        ),
    ]


def main() -> int:
    """Run the ranks and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tensors", type=int, default=32, help="of each rank (%(default)s)")
    parser.add_argument("--elements", type=int, default=1 << 20, help="float32 elements of a tensor (%(default)s)")
    parser.add_argument("--directory", type=Path, help="where to save; by default the system's temporary one")
    add_output_arguments(parser, repetitions=15)
    options = parser.parse_args()
    with RankPool(limit=max(options.ranks)) as pool:
        measured = [measure(ranks, pool, options) for ranks in sorted(options.ranks)]
    return publish(
        "manager",
        [time_table(measured), memory_table(measured), slow_table(measured)],
        {"measured": measured},
        bars={
            f"{each.ranks} ranks, {what}": (value, bound)
            for each in measured
            for what, value, bound in (
                ("save() / copy", each.copy_ratio, COPY_LIMIT),
                ("memory / staged", each.memory_ratio, MEMORY_LIMIT),
                ("slow writer, step / step", each.slow(lambda one: one.during / one.before), STEP_LIMIT),
            )
        },
        unit="ratio",
        limits=[limit for each in measured for limit in limits_of(each)],
        options=options,
    )


if __name__ == "__main__":
    sys.exit(main())
