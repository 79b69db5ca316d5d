"""What every benchmark says in the same way: spreads, the machine, a table, a JSON file, a plot."""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

__all__ = ["Spread", "add_output_arguments", "publish"]

DISTRIBUTIONS = ("torch", "megatron-core", "nvidia-resiliency-ext")
WIDTH = 118


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The median of many repetitions and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Summarize at least two values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)

    def times(self, factor: float) -> "Spread":
        """Return it in another unit."""
        return Spread(median=self.median * factor, low=self.low * factor, high=self.high * factor)

    def __str__(self) -> str:
        """Return the median, and the quartiles in brackets."""
        return f"{_rounded(self.median)} ({_rounded(self.low)} to {_rounded(self.high)})"


def add_output_arguments(parser: argparse.ArgumentParser, *, repetitions: int) -> None:
    """Add the options that all benchmarks have."""
    parser.add_argument("--repetitions", type=_at_least_two, default=repetitions, help="at least 2 (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result here, as PNG; needs matplotlib")


def publish(
    name: str,
    tables: Sequence[Table],
    result: Mapping[str, Any],
    *,
    bars: Mapping[str, tuple[Spread, float | None]],
    unit: str,
    options: argparse.Namespace,
) -> None:
    """Print the tables and write the files that were asked for.

    Args:
        name: of the benchmark.
        tables: to print.
        result: to write as JSON; dataclasses at any depth.
        bars: label -> value and its limit, to draw.
        unit: of the bars.
        options: parsed, with the options of ``add_output_arguments``.
    """
    console = Console(width=WIDTH)
    for table in tables:
        console.print(table)
    machine = _machine()
    console.print("; ".join(f"{key} {value}" for key, value in machine.items()), highlight=False)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"benchmark": name, "machine": machine, "repetitions": options.repetitions, **result}
        options.json.write_text(json.dumps(document, indent=1, default=asdict) + "\n")
        console.print(f"written: {options.json}", highlight=False)
    if options.plot is not None:
        console.print(_plot(name, bars, unit, options.plot), highlight=False)


def _machine() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in DISTRIBUTIONS}
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return {"python": platform.python_version(), **versions, "cpus": os.cpu_count(), "load": load}


def _plot(name: str, bars: Mapping[str, tuple[Spread, float | None]], unit: str, path: Path) -> str:
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed, it comes with the extra 'plot'"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(bars) + 1.5), layout="constrained")
    for row, (spread, limit) in enumerate(bars.values()):
        error = [[spread.median - spread.low], [spread.high - spread.median]]
        axes.barh(row, spread.median, xerr=error, color="tab:blue", capsize=3)
        if limit is not None:
            axes.plot([limit, limit], [row - 0.4, row + 0.4], color="tab:red")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit}; median and quartiles, limits in red")
    axes.set_title(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"drawn: {path}"


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _at_least_two(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{number} repetitions have no spread: take at least 2")
    return number
