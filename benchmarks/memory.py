"""``python benchmarks/memory.py``: memory of trainers and writers at stock, create and reuse, and its growth.

Real gloo ranks go Megatron's own way (see ``asynchronous_jobs.py``) and save the same state many times; each side in
processes of its own, and each side more than once. Private memory (USS) is what a process alone occupies; the process
of NVRx's results queue is a fork of the trainer and shares much of it.

Growth is that of a trainer's resident memory over the saves of the steady state, after the allocator has given back
what is free, as the median over the repetitions. A
rank of ours leaks if its least-squares slope is positive and more than 64 KiB a save above that of stock in the same
run, and if the last third of its saves lies more than 1 MiB above the middle third: allocators take steps, a leak does
not stop. What a rank of a large job needs at start-up is in ``scaling.py``.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from growth import MORE_THAN_STOCK, Growth  # noqa: E402  (the path is set above)
from ranks import RankPool  # noqa: E402
from report import Limit, Spread, add_output_arguments, publish  # noqa: E402
from rich.table import Table  # noqa: E402
from sides import State  # noqa: E402

SIDES = ("stock", "create", "reuse")
PROCESSES = ("trainer", "writer")
WARM = 10
"""Saves that do not count."""
KIB, MIB = 1 << 10, 1 << 20

type Found = Mapping[str, Sequence[Mapping[str, Any]]]
"""Side -> one entry a rank and repetition: process -> ``memory_on_ranks.Memory``."""


def measure(options: argparse.Namespace) -> Found:
    """Run every side ``--repetitions`` times; the file that a create leaves is what the next reuse follows."""
    state = State(
        tensors=options.tensors, elements=options.elements, items=options.items, replicated=options.tensors // 4
    )
    found: dict[str, list[Mapping[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(options.repetitions):
        directory = tempfile.mkdtemp(prefix="memory-", dir=options.directory)
        try:
            for side in SIDES:
                with RankPool() as pool:
                    from memory_on_ranks import memory_on_rank

                    found[side] += pool.run(
                        memory_on_rank,
                        side,
                        state,
                        WARM,
                        options.saves,
                        2,
                        directory,
                        world_size=options.ranks,
                        timeout=200.0,
                    )
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    return found


def memory_table(found: Found) -> Table:
    """Build the table of memory."""
    table = Table(title="Memory of a rank, MiB: median (quartiles) over ranks and repetitions")
    for column in ("side", "process", "peak RSS", "RSS", "USS", "PSS"):
        table.add_column(column, justify="left" if column in ("side", "process") else "right")
    for side, entries in found.items():
        for process in PROCESSES:
            values = (
                str(Spread.of([entry[process].after[kind] / MIB for entry in entries]))
                for kind in ("peak", "rss", "uss", "pss")
            )
            table.add_row(side, process, *values)
    return table


def curves(found: Found, side: str, process: str, ranks: int) -> list[list[list[int]]]:
    """Return the resident bytes by rank, repetition and save."""
    return [[entry[process].resident for entry in found[side][rank::ranks]] for rank in range(ranks)]


def growth(repetitions: Sequence[Sequence[int]]) -> Growth:
    """Return the growth of one rank, as the median over the repetitions."""
    each = [Growth.of(resident) for resident in repetitions]
    return Growth(slope=statistics.median(one.slope for one in each), rise=statistics.median(one.rise for one in each))


def growth_table(found: Found, ranks: int) -> Table:
    """Build the table of growth."""
    table = Table(title="Growth of resident memory: least squares, KiB a save; from the middle to the last third, MiB")
    for column in ("side", "process", *(f"rank {rank}" for rank in range(ranks))):
        table.add_column(column, justify="left" if column in ("side", "process") else "right")
    for side in SIDES:
        for process in PROCESSES:
            grown = [growth(curve) for curve in curves(found, side, process, ranks)]
            table.add_row(side, process, *(f"{each.slope / KIB:.1f}; {each.rise / MIB:.2f}" for each in grown))
    return table


def limits_of(found: Found, ranks: int) -> list[Limit]:
    """Return what has to be shown: no rank of ours leaks."""
    limits = []
    for side in SIDES[1:]:
        both = (curves(found, each, "trainer", ranks) for each in (side, SIDES[0]))
        for rank, (ours, stock) in enumerate(zip(*both, strict=True)):
            leaks = growth(ours).is_leak(growth(stock))
            limits.append(
                Limit(
                    what=f"{side}, rank {rank}: KiB that the trainer grows in a save",
                    value=Spread.of([Growth.of(each).slope / KIB for each in ours]),
                    bound=max(0.0, (growth(stock).slope + MORE_THAN_STOCK) / KIB),
                    excuse="" if leaks else "it does not go on",
                )
            )
    return limits


def main() -> int:
    """Run the ranks and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--saves", type=int, default=60, help="of the steady state (%(default)s)")
    parser.add_argument("--tensors", type=int, default=150, help="of each rank (%(default)s)")
    parser.add_argument("--elements", type=int, default=16_384, help="float32 elements of a tensor (%(default)s)")
    parser.add_argument("--items", type=int, default=20, help="non-tensor items of each rank (%(default)s)")
    parser.add_argument("--directory", type=Path, help="where to save; by default the system's temporary one")
    add_output_arguments(parser, repetitions=2)
    options = parser.parse_args()
    found = measure(options)
    return publish(
        "memory",
        [memory_table(found), growth_table(found, options.ranks)],
        {"memory": found, "warm": WARM},
        bars={
            f"{side}, {process}": (Spread.of([entry[process].after["uss"] / MIB for entry in found[side]]), None)
            for side in SIDES
            for process in PROCESSES
        },
        unit="MiB of private memory",
        limits=limits_of(found, options.ranks),
        options=options,
    )


if __name__ == "__main__":
    sys.exit(main())
