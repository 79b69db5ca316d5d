"""``megatron-ckpt report``: where the time of saves went, from a job's events."""

import argparse
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from megatron_ckpt_ext.cli.output import GOOD, add_json, lines, print_json, table
from megatron_ckpt_ext.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron_ckpt_ext.examine.plots import Plot

__all__ = ["add_parser"]

DESCRIPTION = """\
Read the events of a job (--ckpt-events FILE) and say what each save cost: how long training waited, on which rank, how
many collectives, and why a save was rebuilt or fell back. With -o it is a page that needs no network, and a PNG file
for each of its plots beside it.

Exit code 0: there are events. 2: there are none.
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "report",
        help="say where the time of saves went",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("events", metavar="EVENTS", help="as given to --ckpt-events, or the file of one rank")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a page, such as report.html")
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Run the command."""
    from megatron_ckpt_ext.events import read_events
    from megatron_ckpt_ext.examine.page import page_of, remarks_of
    from megatron_ckpt_ext.examine.plots import plots_of
    from megatron_ckpt_ext.examine.saves import saves_of

    try:
        saves = saves_of(read_events(options.events))
    except OSError as error:
        raise ConfigurationError(
            f"no events can be read from {options.events!r}: {error.strerror}. Give what --ckpt-events was given"
        ) from error
    if options.output is not None:
        plots = plots_of(saves)
        _write(options.output, page_of(f"Saves in {options.events}", saves, plots), plots)
    if options.json:
        print_json({"saves": [asdict(each) for each in saves]})
        return GOOD
    rows = [
        (
            each.step,
            each.ranks,
            f"{1000 * each.slowest:.1f}",
            f"{1000 * median(each.blocking.values()):.1f}",
            each.objects,
            each.others,
        )
        for each in saves
    ]
    table("Saves", ("step", "ranks", "waits, slowest (ms)", "median (ms)", "object collectives", "others"), rows)
    lines(f"steps {', '.join(map(str, steps))}: {remark}" for remark, steps in remarks_of(saves))
    if options.output is not None:
        lines([f"written: {options.output}"])
    return GOOD


def _write(output: Path, page: str, plots: "list[Plot]") -> None:
    from megatron_ckpt_ext.publish.atomic import write_file

    files = {output: page.encode()}
    for plot in plots:
        files[output.with_name(f"{output.stem}.{plot.name}.png")] = plot.png
    try:
        for path, content in files.items():
            write_file(str(path), [content])
    except OSError as error:
        raise ConfigurationError(
            f"{str(output)!r} cannot be written: {error.strerror}. Name a file in an existing directory"
        ) from error
