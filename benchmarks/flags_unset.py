"""``python benchmarks/flags_unset.py``: Megatron training with the package installed and no flag given, against stock.

One job of the laptop recipe on CPU ranks, saving asynchronously. In turn, block by block in the same processes: stock
(every replaced name put back, so that nothing of the package is called), stock again, and with the package installed.
A ratio compares two blocks of the same round, so that what else the machine does hits both. Stock against stock is what
chance does: the extension counts as free of cost if the median of its ratio lies between the quartiles of that one,
widened by 3 %.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from blocks import AGAIN, INSTALLED, KINDS, STOCK, Block  # noqa: E402  (the path is set above)
from report import Limit, Spread, add_output_arguments, publish  # noqa: E402
from rich.table import Table  # noqa: E402

WIDENED = 0.03
SAVES, ITERATIONS_OF_A_SAVE, SETTLED = 2, 4, 2
"""Of a block; iterations before the first block."""
WARM = 2
"""Rounds that do not count."""
TIMEOUT_SECONDS = 580.0
FIELDS = {"wall": "whole block", "cpu": "training thread, CPU", "save_call": "one save call"}


def run_job(rounds: int, ranks: int, output: Path) -> list[list[Block]]:
    """Train; return the blocks of each rank.

    Raises:
        RuntimeError: the job failed; with the end of its log.
    """
    iterations = SETTLED + rounds * len(KINDS) * SAVES * ITERATIONS_OF_A_SAVE + 1
    command = [
        *(sys.executable, "-m", "megatron_ckpt_ext.cli.main", "run", "--cpu", "--nproc", str(ranks)),
        *("--recipe", str(ROOT / "recipes" / "cpu_laptop.yaml"), str(ROOT / "benchmarks" / "alternated_training.py")),
        *("--train-iters", str(iterations), "--save-interval", str(ITERATIONS_OF_A_SAVE), "--eval-iters", "0"),
        *("--log-interval", "1000"),
    ]
    environment = os.environ | {
        "OUTPUT": str(output),
        "PYTHONPATH": str(ROOT),
        "ALTERNATED_SCRIPT": str(ROOT / "recipes" / "pretrain_gpt.py"),
        "ALTERNATED_FOLDER": str(output),
        "ALTERNATED_ROUNDS": str(rounds),
        "ALTERNATED_ITERATIONS": str(SAVES * ITERATIONS_OF_A_SAVE),
    }
    log = output / "log"
    with open(log, "w") as file:
        job = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | str = job.wait(TIMEOUT_SECONDS)
        except BaseException as error:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = f"none within {TIMEOUT_SECONDS:g} s"
    if code != 0:
        raise RuntimeError(f"the training job ended with exit code {code}:\n{log.read_text(errors='replace')[-4000:]}")
    files = (output / f"blocks.{rank}.json" for rank in range(ranks))
    return [[Block(**block) for block in json.loads(file.read_text())] for file in files]


def slowest(by_rank: Sequence[Sequence[Block]]) -> list[Block]:
    """Return the slowest rank's seconds of each block, field by field."""
    return [
        Block(kind=blocks[0].kind, **{field: max(getattr(block, field) for block in blocks) for field in FIELDS})
        for blocks in zip(*by_rank, strict=True)
    ]


def by_kind(blocks: Sequence[Block], field: str) -> dict[str, list[float]]:
    """Return kind -> seconds by round, without the rounds that do not count."""
    return {kind: [getattr(block, field) for block in blocks if block.kind == kind][WARM:] for kind in KINDS}


def ratio(blocks: Sequence[Block], kind: str, field: str) -> Spread:
    """Compare a kind with stock, round by round."""
    seconds = by_kind(blocks, field)
    return Spread.of([one / stock for one, stock in zip(seconds[kind], seconds[STOCK], strict=True)])


def time_table(blocks: Sequence[Block], ranks: int) -> Table:
    """Build the table of times and ratios."""
    table = Table(
        title=f"{SAVES * ITERATIONS_OF_A_SAVE} iterations with {SAVES} saves, {ranks} ranks, ms: median (quartiles)"
    )
    for column in ("time of", *KINDS, f"{AGAIN} / {STOCK}", f"{INSTALLED} / {STOCK}"):
        table.add_column(column, justify="left" if column == "time of" else "right")
    for field, name in FIELDS.items():
        seconds = by_kind(blocks, field)
        times = [str(Spread.of(seconds[kind]).times(1000)) for kind in KINDS]
        table.add_row(name, *times, *(str(ratio(blocks, kind, field)) for kind in (AGAIN, INSTALLED)))
    return table


def main() -> int:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="where to save; by default the system's temporary one")
    add_output_arguments(parser, repetitions=24)
    options = parser.parse_args()
    output = tempfile.mkdtemp(prefix="flags-unset-", dir=options.directory)
    try:
        blocks = slowest(run_job(WARM + options.repetitions, options.ranks, Path(output)))
    finally:
        shutil.rmtree(output, ignore_errors=True)
    chance, installed = ratio(blocks, AGAIN, "wall"), ratio(blocks, INSTALLED, "wall")
    name = "whole block, installed / stock"
    return publish(
        "flags_unset",
        [time_table(blocks, options.ranks)],
        {
            "blocks": [block.to_json() for block in blocks],
            "warm": WARM,
            "ratios": {field: {kind: ratio(blocks, kind, field) for kind in (AGAIN, INSTALLED)} for field in FIELDS},
        },
        bars={f"{AGAIN} / {STOCK}": (chance, None), f"{INSTALLED} / {STOCK}": (installed, chance.high * (1 + WIDENED))},
        unit="ratio of whole blocks",
        limits=[
            Limit(what=name, value=installed, bound=chance.high * (1 + WIDENED)),
            Limit(what=name, value=installed, bound=chance.low * (1 - WIDENED), at_least=True),
        ],
        options=options,
    )


if __name__ == "__main__":
    sys.exit(main())
