"""What every benchmark says in the same way: spreads, limits, the machine, tables, a JSON file, a plot."""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from rich.console import Console
from rich.table import Table

__all__ = ["Limit", "Spread", "add_output_arguments", "publish"]

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
        """Summarize the values; a single one has no spread."""
        if len(values) == 1:
            return cls(median=values[0], low=values[0], high=values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)

    def times(self, factor: float) -> "Spread":
        """Return it in another unit."""
        return Spread(median=self.median * factor, low=self.low * factor, high=self.high * factor)

    def __str__(self) -> str:
        """Return the median, and the quartiles in brackets."""
        return f"{_rounded(self.median)} ({_rounded(self.low)} to {_rounded(self.high)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """What a benchmark has to show."""

    what: str
    """Sentence without its end."""
    value: Spread
    """What was measured."""
    bound: float
    """In the unit of ``value``."""
    at_least: bool = False
    """Whether ``bound`` is the least that is allowed, and not the most."""
    by: Literal["median", "low"] = "median"
    """What of ``value`` is judged: ``low`` where equality is enough, since the median of equals is on either side."""
    excuse: str = ""
    """Why a value beyond the bound is none to worry about, if so."""

    @property
    def kept(self) -> bool:
        """Whether the value is within the bound."""
        judged: float = getattr(self.value, self.by)
        return judged >= self.bound if self.at_least else judged <= self.bound

    @property
    def met(self) -> bool:
        """Whether it is shown."""
        return self.kept or bool(self.excuse)

    @property
    def judged(self) -> str:
        """The bound, and what came of it."""
        side = "at least" if self.at_least else "at most"
        result = "[green]met[/green]" if self.met else "[bold red]MISSED[/bold red]"
        return f"{side} {_rounded(self.bound)}: {result}" + ("" if self.kept or not self.excuse else f", {self.excuse}")

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "met": self.met}


def add_output_arguments(parser: argparse.ArgumentParser, *, repetitions: int) -> None:
    """Add the options that all benchmarks have."""
    parser.add_argument("--repetitions", type=_at_least_one, default=repetitions, help="1 has no spread (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result here, as PNG; needs matplotlib")


def publish(
    name: str,
    tables: Sequence[Table],
    result: Mapping[str, Any],
    *,
    bars: Mapping[str, tuple[Spread, float | None]],
    unit: str,
    limits: Sequence[Limit],
    options: argparse.Namespace,
) -> int:
    """Print the tables, judge the limits, and write the files that were asked for.

    Args:
        name: of the benchmark.
        tables: to print.
        result: to write as JSON; dataclasses at any depth.
        bars: label -> value and its limit, to draw.
        unit: of the bars.
        limits: what has to be shown.
        options: parsed, with the options of ``add_output_arguments``.

    Returns:
        The exit code: 1 if a limit is missed.
    """
    console = Console(width=WIDTH)
    for table in (*tables, _limit_table(limits)):
        console.print(table)
    met = all(limit.met for limit in limits)
    machine = _machine()
    console.print("; ".join(f"{key} {value}" for key, value in machine.items()), highlight=False)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"benchmark": name, "machine": machine, "repetitions": options.repetitions, **result}
        document |= {"limits": [limit.to_json() for limit in limits], "met": met}
        options.json.write_text(json.dumps(document, indent=1, default=asdict) + "\n")
        console.print(f"written: {options.json}", highlight=False)
    if options.plot is not None:
        console.print(_plot(name, bars, unit, options.plot), highlight=False)
    return 0 if met else 1


def _limit_table(limits: Sequence[Limit]) -> Table:
    table = Table(title="Limits")
    table.add_column("what")
    table.add_column("median (quartiles)", justify="right")
    table.add_column("judged", justify="right")
    for limit in limits:
        table.add_row(limit.what, str(limit.value), limit.judged)
    return table


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


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} repetitions measure nothing: take at least 1")
    return number
