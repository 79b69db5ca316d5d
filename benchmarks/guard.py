"""``python benchmarks/guard.py``: what slots and the layout guard cost one rank in each save.

One real gloo rank saves a synthetic Megatron sharded state dict twice: the first save makes the prepared file, the
second follows it, as in a resumed job. Then what slots and guard did in the second save is repeated on its own
objects. The tensors are tiny, for the cost does not depend on their bytes; that of a slot depends on its item's.

The limit holds for what the training thread does in every save: reading what the rank holds and comparing it with the
save before (``holdings``), padding items to their slots (``slots``), and comparing what is held with the slice (``held
drift``). Beside it, without a limit: describing what is held, in the first save of a job and when shards have changed,
and the digest of what was written, which the writer process makes behind its write. All are measured as the CPU time of
one thread: the wall clock of a shared machine counts what others do.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from guarded_save import (  # noqa: E402
    ELSEWHERE,
    PER_ITEM_MS,
    PER_THOUSAND_TENSORS_MS,
    STEADY,
    Row,
    Size,
    measure,
    one_rank,
)
from report import Limit, add_output_arguments, publish  # noqa: E402
from rich.table import Table  # noqa: E402

TENSORS, ITEMS = (1_000, 5_000, 20_000), (10, 100, 1_000)


def cost_table(rows: Sequence[Row]) -> Table:
    """Build the table of all sizes against the limit."""
    table = Table(title="Slots and layout guard, ms of CPU a save and rank: median (quartiles)")
    others = ("first save: describe", "writer: layout")
    for column in ("tensors", "items", *STEADY, "together", "limit", "share", *others):
        table.add_column(column, justify="right")
    for row in rows:
        color = "green" if row.within_limit else "bold red"
        table.add_row(
            f"{row.size.tensors:,}",
            f"{row.size.items:,}",
            *(f"{row.parts[part].median:.2f}" for part in STEADY),
            str(row.cpu),
            f"{row.limit_ms:.1f}",
            f"[{color}]{row.cpu.median / row.limit_ms:.0%}[/{color}]",
            *(f"{row.parts[part].median:.2f}" for part in ELSEWHERE),
        )
    return table


def unit_table(rows: Sequence[Row]) -> Table:
    """Build the table of the sizes that have only tensors or only items, by the unit of the limit."""
    table = Table(title="Together by unit, ms: median (quartiles)")
    for column in ("unit", "number", "CPU", "wall clock", "limit"):
        table.add_column(column, justify="left" if column == "unit" else "right")
    for row in rows:
        if not row.size.items:
            factor, unit, limit = 1000 / row.size.tensors, "1,000 tensors", PER_THOUSAND_TENSORS_MS
        elif not row.size.tensors:
            factor, unit, limit = 1 / row.size.items, f"item of {row.size.item_bytes} bytes", PER_ITEM_MS
        else:
            continue
        number = f"{row.size.tensors or row.size.items:,}"
        table.add_row(unit, number, str(row.cpu.times(factor)), str(row.wall.times(factor)), str(limit))
    return table


def _sizes(row: Row) -> str:
    return f"{row.size.tensors:,} tensors, {row.size.items:,} items"


def main() -> int:
    """Measure all sizes: tensors only, items only, both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, nargs="+", default=TENSORS)
    parser.add_argument("--items", type=int, nargs="+", default=ITEMS, help="non-tensor items")
    parser.add_argument("--item-bytes", type=int, default=1024, help="content of a non-tensor item (%(default)s)")
    add_output_arguments(parser, repetitions=25)
    options = parser.parse_args()
    pairs = [(tensors, 0) for tensors in options.tensors] + [(0, items) for items in options.items]
    pairs += zip(options.tensors, options.items, strict=False)
    with one_rank():
        rows = [
            measure(Size(tensors=tensors, items=items, item_bytes=options.item_bytes), options.repetitions)
            for tensors, items in pairs
        ]
    return publish(
        "guard",
        [cost_table(rows), unit_table(rows)],
        {"rows": rows},
        bars={_sizes(row): (row.cpu, row.limit_ms) for row in rows},
        unit="ms of CPU of the training thread a save",
        limits=[
            Limit(what=f"{_sizes(row)}: training thread, ms of CPU a save", value=row.cpu, bound=row.limit_ms)
            for row in rows
        ],
        options=options,
    )


if __name__ == "__main__":
    sys.exit(main())
