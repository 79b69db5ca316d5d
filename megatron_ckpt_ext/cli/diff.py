"""``megatron-ckpt diff``: what differs between two checkpoints."""

import argparse
from typing import Any

from megatron_ckpt_ext.cli.output import FOUND, GOOD, add_json, lines, print_json, table, tracked

__all__ = ["add_parser"]

DESCRIPTION = """\
Compare two checkpoints: which tensors and objects only one of them has, and which have another shape or dtype or are
cut into other shards. --values also compares what is in them, element by element, with the largest difference; shards
may be cut otherwise, as after a change of the parallelism.

Exit code 0: nothing differs. 1: something does.
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "diff",
        help="compare two checkpoints",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", metavar="A", help="a checkpoint")
    parser.add_argument("second", metavar="B", help="another one")
    parser.add_argument("--values", action="store_true", help="compare contents as well")
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Run the command."""
    from megatron_ckpt_ext.examine.compare import Side, comparable, compare_layouts, compare_values

    first, second = Side.of(options.first), Side.of(options.second)
    layout = list(compare_layouts(first.layout, second.layout))
    values = []
    if options.values:
        shared = set(first.layout.objects) & set(second.layout.objects)
        total = len(shared) + len(comparable(first.layout, second.layout))
        compared = tracked(compare_values(first, second), total=total, what="comparing")
        values = [change for change in compared if change is not None]
    if options.json:
        print_json({"layout": [each._asdict() for each in layout], "values": [each._asdict() for each in values]})
    else:
        table("Layout", ("name", "difference"), ((each.name, each.what) for each in layout))
        rows = ((each.name, each.what, "" if each.largest is None else f"{each.largest:g}") for each in values)
        table("Values", ("name", "difference", "largest"), rows)
        lines([_closing(len(layout), len(values) if options.values else None)])
    return FOUND if layout or values else GOOD


def _closing(layout: int, values: int | None) -> str:
    in_layout = f"{layout} differences in layout" if layout else "no difference in layout"
    if values is None:
        return in_layout
    return f"{in_layout}, {values} in values" if values else f"{in_layout}, none in values"
