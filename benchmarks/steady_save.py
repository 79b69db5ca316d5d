"""``python benchmarks/steady_save.py``: asynchronous saves of a resumed job, phase by phase, against stock.

Real gloo ranks with a writer process each for either side, all at the same time; the sides save in turn. Both go
Megatron's own way (see ``asynchronous_jobs.py``), with the same state, the same staging in shared memory and the same
number of files. Only the training thread is timed:

* save call: ``dist_checkpointing.save``: planning, slots, guard, snapshot;
* hand-over: until the writer process has what it needs;
* poll: one look at a save that is still being written;
* finalize: all polls from when every rank's writer has ended until the save is published and done with.

A time is that of the slowest rank. A ratio compares two saves of the same round, so that what else the machine does
hits both; beside it stands the ratio of the CPU time of the training thread, which other load disturbs less. The save
call counts as no slower than stock unless the lower quartile of its ratio is above 1: the median of two equal sides
lies on either side of 1.
"""

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ranks import RankPool  # noqa: E402  (the path is set above)
from report import Limit, Spread, add_output_arguments, publish  # noqa: E402
from rich.table import Table  # noqa: E402
from sides import State  # noqa: E402

from megatron_ckpt_ext.collectives import CollectiveSums, is_object_collective  # noqa: E402

PHASES = ("save call", "hand-over", "poll", "finalize")
SIDES = ("stock", "ours")
FINALIZE_LIMIT, FINALIZE_RANKS = 0.25, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Saves of one kind with one number of ranks."""

    kind: str
    """``first`` or ``steady``."""
    ranks: int
    seconds: Mapping[str, Mapping[str, Sequence[float]]]
    """Side -> phase -> seconds of the slowest rank, by save."""
    cpu: Mapping[str, Mapping[str, Sequence[float]]]
    """The same while the thread computed."""
    collectives: Mapping[str, Mapping[str, Mapping[str, int]]]
    """Side -> phase -> collectives by name, of the rank and save with the most."""

    def ratio(self, phase: str) -> Spread:
        """Compare one phase, round by round."""
        return _ratio(self.seconds["ours"][phase], self.seconds["stock"][phase])

    def cpu_ratio(self, phase: str) -> Spread:
        """Compare what the training thread computed in one phase."""
        return _ratio(self.cpu["ours"][phase], self.cpu["stock"][phase])

    def spread(self, phase: str, side: str) -> str:
        """Return milliseconds. A poll that found the writers done already counts as finalizing."""
        seconds = [each for each in self.seconds[side][phase] if each]
        return str(Spread.of(seconds).times(1000)) if seconds else ""

    def ratio_texts(self, phase: str) -> tuple[str, str]:
        """Return both ratios where every save has the phase."""
        everywhere = all(min(self.seconds[side][phase]) for side in SIDES)
        return (str(self.ratio(phase)), str(self.cpu_ratio(phase))) if everywhere else ("", "")

    def objects(self, side: str) -> int:
        """Return the object collectives of a save."""
        return sum(CollectiveSums.of(each).objects for each in self.collectives[side].values())


def _ratio(ours: Sequence[float], stock: Sequence[float]) -> Spread:
    return Spread.of([one / other for one, other in zip(ours, stock, strict=True)])


def _whole(phases: Mapping[str, Sequence[float]]) -> list[float]:
    """Return what each save cost the training thread, the poll apart: training chooses how often it looks."""
    return [sum(each) for each in zip(phases["save call"], phases["hand-over"], phases["finalize"], strict=True)]


def measure(ranks: int, pool: RankPool, options: argparse.Namespace) -> list[Measured]:
    """Save on ``ranks`` real ranks."""
    from steady_on_ranks import save_on_rank

    state = State(
        tensors=options.tensors, elements=options.elements, items=options.items, replicated=options.replicated
    )
    directory = tempfile.mkdtemp(prefix="steady-save-", dir=options.directory)
    try:
        by_rank = pool.run(
            save_on_rank,
            state,
            options.jobs,
            options.repetitions,
            options.workers,
            directory,
            world_size=ranks,
            timeout=580.0,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    found = []
    for kind in ("first", "steady"):
        saves = {side: list(zip(*(getattr(rank, kind)[side] for rank in by_rank), strict=True)) for side in SIDES}
        found.append(
            Measured(
                kind=kind,
                ranks=ranks,
                seconds={side: _slowest([[rank.seconds for rank in save] for save in saves[side]]) for side in SIDES},
                cpu={side: _slowest([[rank.cpu for rank in save] for save in saves[side]]) for side in SIDES},
                collectives={
                    side: {
                        phase: _most([rank.collectives for s in saves[side] for rank in s], phase) for phase in PHASES
                    }
                    for side in SIDES
                },
            )
        )
    return found


def _slowest(saves: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, list[float]]:
    return {phase: [max(rank.get(phase, 0.0) for rank in save) for save in saves] for phase in PHASES}


def _most(saves: Sequence[Mapping[str, Mapping[str, int]]], phase: str) -> dict[str, int]:
    most: Counter[str] = Counter()
    for save in saves:
        most |= Counter(save.get(phase, {}))
    return dict(most)


def time_table(found: Sequence[Measured], options: argparse.Namespace) -> Table:
    """Build the table of times and ratios."""
    table = Table(
        title=f"One asynchronous save, ms of the training thread: median (quartiles); {options.tensors} own and "
        f"{options.replicated} replicated tensors of {4 * options.elements // 1024} KiB, {options.items} items a rank"
    )
    for column in ("save", "ranks", "phase", "stock", "ours", "ours / stock", "thread CPU"):
        table.add_column(column, justify="left" if column in ("save", "phase") else "right")
    for each in found:
        for phase in PHASES:
            times = [each.spread(phase, side) for side in SIDES]
            table.add_row(each.kind, str(each.ranks), phase, *times, *each.ratio_texts(phase))
        times = [str(Spread.of(_whole(each.seconds[side])).times(1000)) for side in SIDES]
        ratios = [_ratio(_whole(of["ours"]), _whole(of["stock"])) for of in (each.seconds, each.cpu)]
        table.add_row(each.kind, str(each.ranks), "all but polls", *times, *map(str, ratios), end_section=True)
    return table


def collective_table(found: Sequence[Measured]) -> Table:
    """Build the table of collectives."""
    table = Table(title="Collectives of one save by phase; object collectives in bold")
    for column in ("save", "ranks", "side", *PHASES, "objects"):
        table.add_column(column, justify="left" if column in ("save", "side", *PHASES) else "right")
    for each in found:
        for side in SIDES:
            cells = [_named(each.collectives[side][phase]) for phase in PHASES]
            table.add_row(each.kind, str(each.ranks), side, *cells, str(each.objects(side)))
    return table


def _named(counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"[bold]{number} {name}[/bold]" if is_object_collective(name) else f"{number} {name}"
        for name, number in sorted(counts.items())
    )


def limits_of(each: Measured) -> list[Limit]:
    """Return what has to be shown with this number of ranks."""
    name = f"{each.kind} save, {each.ranks} ranks: "
    objects = float(each.objects("ours"))
    limits = [Limit(what=f"{name}object collectives", value=Spread(median=objects, low=objects, high=objects), bound=0)]
    if each.kind == "steady":
        limits.append(Limit(what=f"{name}save call, ours / stock", value=each.ratio("save call"), bound=1, by="low"))
        if each.ranks == FINALIZE_RANKS:
            limits.append(
                Limit(what=f"{name}finalize, ours / stock", value=each.ratio("finalize"), bound=FINALIZE_LIMIT)
            )
    return limits


def main() -> int:
    """Run the ranks and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--jobs", type=int, default=3, help="resumed jobs (%(default)s)")
    parser.add_argument("--tensors", type=int, default=600, help="of each rank alone (%(default)s)")
    parser.add_argument("--replicated", type=int, default=200, help="tensors that every rank holds (%(default)s)")
    parser.add_argument("--elements", type=int, default=4_096, help="float32 elements of a tensor (%(default)s)")
    parser.add_argument("--items", type=int, default=20, help="non-tensor items of each rank (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="files that each rank writes (%(default)s)")
    parser.add_argument("--directory", type=Path, help="where to save; by default the system's temporary one")
    add_output_arguments(parser, repetitions=6)
    options = parser.parse_args()
    with RankPool(limit=max(options.ranks)) as pool:
        found = [each for ranks in sorted(options.ranks) for each in measure(ranks, pool, options)]
    bars = {
        f"{each.kind}, {each.ranks} ranks, {phase}": (
            each.ratio(phase),
            FINALIZE_LIMIT if phase == "finalize" and each.ranks == FINALIZE_RANKS and each.kind == "steady" else None,
        )
        for each in found
        for phase in ("save call", "finalize")
    }
    return publish(
        "steady_save",
        [time_table(found, options), collective_table(found)],
        {"measured": found, "jobs": options.jobs},
        bars=bars,
        unit="ours / stock",
        limits=[limit for each in found for limit in limits_of(each)],
        options=options,
    )


if __name__ == "__main__":
    sys.exit(main())
