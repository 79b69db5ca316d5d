"""``python benchmarks/scaling.py``: planning, start-up and publishing against the size of a job.

Plans and write results of a large job are synthetic; what is done with them is real: Megatron's planner makes the
layout, NVRx's ``finish`` or our writer process publishes it, ``PreparedMetadata.load`` starts a rank up. Planning runs
on one real rank with torch's fake process group for its peers. "Whole file" is an emulation of reuse without slices:
every rank unpickles the whole layout, and the coordinator pickles it in every save.

Each measurement has a process of its own: a fork that has loaded a tiny job before, so that what is timed does not copy
pages of its parent. A ratio compares two of the same round, so that what else the machine does hits both. The stock
side of a limit is its fastest variant: unpickling and publishing with the garbage collector paused, publishing without
the plans of all ranks, though NVRx pickles those too. Files are in the page cache on both sides.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from processes import in_child  # noqa: E402  (the path is set above)
from report import Limit, Spread, add_output_arguments, publish  # noqa: E402
from rich.table import Table  # noqa: E402
from scaled import Loaded, Published, published, started, unpickled  # noqa: E402
from scaled_plan import Planned, planned  # noqa: E402
from synthetic_job import Shape  # noqa: E402

SHAPES = ("10000x16", "100000x16", "100000x128", "100000x4096", "1000000x1024")
MILLION, THOUSAND_RANKS = 1_000_000, 1_024
PUBLISH_TIMES, START_TIMES = 100, 500
START_MS, START_BYTES, START_OPENS = 10.0, 1_000_000, 1
PUBLISHED, PLANNED_SAVES = 2, 12
"""Rounds of publishing at most, since stock takes half a minute for a million entries; saves to plan at least."""
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What was measured for one shape."""

    shape: Shape
    entries: int
    published: Published
    planned: Planned
    started: list[Loaded]
    """A rank that is not the coordinator, by round."""
    coordinator: list[Loaded]
    whole: list[Loaded]
    """Unpickling the whole file with the garbage collector paused, as reading our own does."""
    whole_collecting: list[Loaded]
    """The same with it on, as ``pickle.load`` by itself."""

    @property
    def publish_times(self) -> Spread:
        """How many times longer stock publishes on the training thread."""
        return _times(self.published.stock, self.published.training_thread)

    @property
    def start_times(self) -> Spread:
        """How many times longer unpickling the whole file takes than starting a rank up."""
        return _times([each.seconds for each in self.whole], [each.seconds for each in self.started])

    @property
    def plan_ratio(self) -> Spread:
        """Our planning against stock's."""
        return _times(self.planned.ours, self.planned.stock)


def _times(left: Sequence[float], right: Sequence[float]) -> Spread:
    return Spread.of([one / other for one, other in zip(left, right, strict=True)])


def measure(shape: Shape, repetitions: int, parent: Path | None) -> Row:
    """Measure one shape, one process after the other."""
    directory = tempfile.mkdtemp(prefix="scaling-", dir=parent)
    try:
        publishing = in_child(published, shape, directory, min(repetitions, PUBLISHED))
        rounds = [
            (
                in_child(started, directory, 1, shape.ranks),
                in_child(started, directory, 0, shape.ranks),
                in_child(unpickled, directory, False),
                in_child(unpickled, directory, True),
            )
            for _ in range(repetitions)
        ]
        planning = in_child(planned, shape, directory, max(repetitions, PLANNED_SAVES))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    by_kind = [list(kind) for kind in zip(*rounds, strict=True)]
    return Row(
        shape=shape,
        entries=shape.total,
        published=publishing,
        planned=planning,
        started=by_kind[0],
        coordinator=by_kind[1],
        whole=by_kind[2],
        whole_collecting=by_kind[3],
    )


def limits_of(row: Row) -> list[Limit]:
    """Return what has to be shown for this shape."""
    found = []
    name = f"{row.shape.entries:,} entries, {row.shape.ranks:,} ranks: "
    if row.shape.entries >= MILLION:
        found += [
            Limit(
                what=f"{name}stock publishing / ours, training thread",
                value=row.publish_times,
                bound=PUBLISH_TIMES,
                at_least=True,
            ),
            Limit(
                what=f"{name}unpickling the whole file / start-up of a rank",
                value=row.start_times,
                bound=START_TIMES,
                at_least=True,
            ),
        ]
    if row.shape.ranks == THOUSAND_RANKS:
        counts = [each.counts for each in row.started]
        found += [
            Limit(what=f"{name}start-up, ms", value=_ms([each.seconds for each in row.started]), bound=START_MS),
            Limit(
                what=f"{name}start-up, bytes read",
                value=Spread.of([each.bytes_read for each in counts]),
                bound=START_BYTES,
            ),
            Limit(
                what=f"{name}start-up, files opened",
                value=Spread.of([each.opens for each in counts]),
                bound=START_OPENS,
            ),
        ]
    return found


def publish_table(rows: Sequence[Row]) -> Table:
    """Build the table of publishing."""
    table = Table(title="Publishing one save on the coordinator, ms: median (quartiles)")
    for column in (
        "entries x ranks",
        "stock, with all plans, once",
        "stock",
        "ours, in the writer",
        "ours, training thread",
        "stock / ours",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            _name(row),
            f"{1000 * row.published.stock_with_plans:.0f}",
            str(_ms(row.published.stock)),
            str(_ms(row.published.background)),
            str(_ms(row.published.training_thread)),
            str(row.publish_times),
        )
    return table


def start_table(rows: Sequence[Row]) -> Table:
    """Build the table of start-up."""
    table = Table(title="Start-up of one rank, and unpickling the whole file (reuse without slices), ms and MiB")
    for column in (
        "entries x ranks",
        "rank 1",
        "rank 0",
        "read",
        "memory",
        "whole file",
        "with collector",
        "read",
        "memory",
        "whole file / rank 1",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            _name(row),
            str(_ms([each.seconds for each in row.started])),
            str(_ms([each.seconds for each in row.coordinator])),
            _mib(row.started[0].counts.bytes_read),
            _mib(row.started[0].counts.grown),
            str(_ms([each.seconds for each in row.whole])),
            str(_ms([each.seconds for each in row.whole_collecting])),
            _mib(row.whole[0].counts.bytes_read),
            _mib(row.whole[0].counts.grown),
            str(row.start_times),
        )
    return table


def plan_table(rows: Sequence[Row]) -> Table:
    """Build the table of planning."""
    table = Table(title="Planning a steady save on one rank, ms: median (quartiles)")
    for column in (
        "entries x ranks",
        "items",
        "stock",
        "ours",
        "ours / stock",
        "guard alone",
        "planning together, once",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            _name(row),
            f"{row.shape.of_a_rank:,}",
            str(_ms(row.planned.stock)),
            str(_ms(row.planned.ours)),
            str(row.plan_ratio),
            str(_ms(row.planned.guard)),
            f"{1000 * row.published.global_plan:.0f}",
        )
    return table


def _name(row: Row) -> str:
    return f"{row.shape.entries:,} x {row.shape.ranks:,}"


def _ms(seconds: Sequence[float]) -> Spread:
    return Spread.of(seconds).times(1000)


def _mib(size: int) -> str:
    return f"{size / MIB:.2g}" if size < 10 * MIB else f"{size / MIB:,.0f}"


def main() -> int:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shapes", type=Shape.parse, nargs="+", metavar="ENTRIESxRANKS", default=[Shape.parse(each) for each in SHAPES]
    )
    parser.add_argument("--directory", type=Path, help="where to write; by default the system's temporary one")
    add_output_arguments(parser, repetitions=3)
    options = parser.parse_args()
    rows = [measure(shape, options.repetitions, options.directory) for shape in options.shapes]
    return publish(
        "scaling",
        [publish_table(rows), start_table(rows), plan_table(rows)],
        {
            "rows": rows,
            "ratios": [
                {"publish_times": row.publish_times, "start_times": row.start_times, "plan": row.plan_ratio}
                for row in rows
            ],
        },
        bars={
            f"{_name(row)}": (row.start_times, START_TIMES if row.shape.entries >= MILLION else None) for row in rows
        },
        unit="unpickling the whole file / start-up of a rank",
        limits=[limit for row in rows for limit in limits_of(row)],
        options=options,
    )


if __name__ == "__main__":
    sys.exit(main())
