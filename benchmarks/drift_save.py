"""``python benchmarks/drift_save.py``: saves that drift and are rebuilt, and steady saves, against stock.

Two real gloo ranks save the same state in four ways, in turn: stock megatron-core with NVRx, with and without its
constant-structure cache, and ours, drifting every time and never. The state that drifts gains or loses one small tensor
of the last rank with every save; the stock side that plans every save has the same changes. A time is that of the
slowest rank. A ratio compares two saves of the same round, so that what else the machine does hits both; beside
it stands the ratio of the CPU time of the thread that saves, which other load disturbs less. All ranks emulate CUDA,
which costs both sides the same.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ranks import RankPool  # noqa: E402  (the path is set above)
from report import Limit, Spread, add_output_arguments, publish  # noqa: E402
from rich.table import Table  # noqa: E402
from sides import Phases, Side, State  # noqa: E402

DRIFT_LIMIT = 1.3
RATIOS = (
    (Side.DRIFT, Side.STOCK, DRIFT_LIMIT),
    (Side.DRIFT, Side.STOCK_CONSTANT, None),
    (Side.REUSE, Side.STOCK_CONSTANT, None),
    (Side.REUSE, Side.STOCK, None),
)

type Rounds = Mapping[Side, Sequence[Phases]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Two sides, round by round."""

    ours: str
    stock: str
    whole: Spread
    """Ratio of the whole saves."""
    blocking: Spread
    """Ratio of planning and finalizing together, the parts of the training thread."""
    cpu: Spread
    """Ratio of the CPU time of the calling thread over the whole save."""
    limit: float | None
    """For the whole save."""


def slowest(by_rank: Sequence[Rounds]) -> Rounds:
    """Return the slowest rank's phases of each save."""
    return {
        side: [max(phases, key=lambda each: each.whole) for phases in zip(*(r[side] for r in by_rank), strict=True)]
        for side in Side
    }


def ratios(rounds: Rounds) -> list[Ratio]:
    """Compare the sides."""
    compared = []
    for ours, stock, limit in RATIOS:
        pairs = list(zip(rounds[ours], rounds[stock], strict=True))
        compared.append(
            Ratio(
                ours=ours.value,
                stock=stock.value,
                whole=Spread.of([left.whole / right.whole for left, right in pairs]),
                blocking=Spread.of([left.blocking / right.blocking for left, right in pairs]),
                cpu=Spread.of([left.cpu / right.cpu for left, right in pairs]),
                limit=limit,
            )
        )
    return compared


def time_table(rounds: Rounds, state: State, ranks: int) -> Table:
    """Build the table of times."""
    table = Table(
        title=f"One save of {state.tensors} tensors of {4 * state.elements / 1024:.0f} KiB and {state.items} items a "
        f"rank, {ranks} ranks; ms: median (quartiles)"
    )
    for column in ("save", "plan", "write", "finalize", "whole"):
        table.add_column(column, justify="left" if column == "save" else "right")
    for side, saves in rounds.items():
        columns = [[each.plan for each in saves], [each.write for each in saves], [each.finalize for each in saves]]
        whole = [each.whole for each in saves]
        table.add_row(side.value, *(str(Spread.of(column).times(1000)) for column in (*columns, whole)))
    return table


def ratio_table(compared: Sequence[Ratio]) -> Table:
    """Build the table of ratios."""
    table = Table(title="Ratios within a round: median (quartiles)")
    for column in ("save", "against", "whole", "plan + finalize", "thread CPU"):
        table.add_column(column, justify="left" if column in ("save", "against") else "right")
    for ratio in compared:
        table.add_row(ratio.ours, ratio.stock, str(ratio.whole), str(ratio.blocking), str(ratio.cpu))
    return table


def main() -> int:
    """Run the ranks and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=300, help="of each rank (%(default)s)")
    parser.add_argument("--elements", type=int, default=16_384, help="float32 elements of a tensor (%(default)s)")
    parser.add_argument("--items", type=int, default=20, help="non-tensor items of each rank (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="where to save; by default the system's temporary one")
    add_output_arguments(parser, repetitions=24)
    options = parser.parse_args()
    state = State(tensors=options.tensors, elements=options.elements, items=options.items)
    directory = tempfile.mkdtemp(prefix="drift-save-", dir=options.directory)
    try:
        with RankPool() as pool:
            from timed_saves import time_on_rank

            by_rank = pool.run(
                time_on_rank, state, options.repetitions, directory, world_size=options.ranks, timeout=550.0
            )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    rounds = slowest(by_rank)
    compared = ratios(rounds)
    return publish(
        "drift_save",
        [time_table(rounds, state, options.ranks), ratio_table(compared)],
        {"state": state, "ranks": options.ranks, "seconds": rounds, "ratios": compared},
        bars={f"{ratio.ours}\nagainst {ratio.stock}": (ratio.whole, ratio.limit) for ratio in compared},
        unit="ratio of whole saves",
        limits=[
            Limit(what=f"{ratio.ours} / {ratio.stock}", value=ratio.whole, bound=ratio.limit)
            for ratio in compared
            if ratio.limit is not None
        ],
        options=options,
    )


if __name__ == "__main__":
    sys.exit(main())
