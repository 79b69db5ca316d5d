"""``megatron-ckpt inspect``: what a checkpoint or a prepared file holds."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_ckpt_ext.cli.output import FOUND, GOOD, add_json, byte_text, lines, print_json, table
from megatron_ckpt_ext.cli.tree import tree_lines

if TYPE_CHECKING:
    from megatron_ckpt_ext.examine.summary import Entry, Summary

__all__ = ["add_parser"]

DESCRIPTION = """\
Say what a checkpoint (torch_dist, fsdp_dtensor, plain DCP) or a prepared file holds: whether it is complete, tensors
and bytes by dtype, files and writers, largest items; of a prepared file also the settings of its job and the head
room of its slots. Reads no tensors.

Exit code 0: complete. 1: not complete, or a prepared file that cannot be used.
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "inspect",
        help="say what a checkpoint or a prepared file holds",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint's directory, or a prepared file")
    parser.add_argument(
        "--keys", metavar="PATTERN", help="list the items whose name matches, as in a shell: '*.weight'"
    )
    parser.add_argument("--tree", action="store_true", help="list names as a tree, with the bytes below each")
    parser.add_argument("--largest", type=int, default=10, metavar="N", help="how many of the largest (%(default)s)")
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Run the command."""
    from megatron_ckpt_ext.examine.summary import summarize

    keys = options.keys or ("*" if options.tree else None)
    summary = summarize(options.path, keys=keys, largest=max(0, options.largest))
    if options.json:
        print_json(asdict(summary))
    else:
        _print(summary, tree=options.tree)
    return GOOD if summary.complete else FOUND


def _print(summary: "Summary", *, tree: bool) -> None:
    lines(_facts(summary))
    table("By dtype", ("dtype", "items", "size"), _sizes(summary.dtypes))
    if len(summary.files) <= 64:
        table("Files", ("file", "items", "size"), _sizes(summary.files))
    if summary.slots is not None:
        table(
            "Tightest slots", ("item", "head room"), ((name, byte_text(left)) for name, left in summary.slots.tightest)
        )
    table("Largest items", ("item", "what", "size", "file"), _rows(summary.largest))
    if tree:
        lines(tree_lines((each.name, each.bytes) for each in summary.listed))
    else:
        table("Items", ("item", "what", "size", "file"), _rows(summary.listed))


def _facts(summary: "Summary") -> Iterator[str]:
    state = "complete" if summary.complete else f"not complete: {summary.reason}"
    yield f"{summary.path}: {summary.kind}, {state}"
    if summary.step is not None:
        yield f"step: {summary.step}"
    yield f"items: {summary.tensors} tensors in {summary.shards} shards, {summary.objects} objects"
    yield f"size: {byte_text(summary.bytes)} in {len(summary.files)} files"
    if summary.ranks is not None:
        yield f"writers: {summary.ranks} ranks, at most {summary.workers} files each"
    if summary.saved_as is not None:
        yield f"saved as: {summary.saved_as}"
    if summary.provenance is not None:
        yield f"layout: {summary.provenance}"
    for name, value in summary.fingerprint.items():
        yield f"{name.replace('_', ' ')}: {value}"
    if (slots := summary.slots) is not None:
        yield f"slots: {slots.items}, {byte_text(slots.bytes)}, of which {byte_text(slots.used)} were used"


def _sizes(counted: Any) -> Iterator[tuple[str, int, str]]:
    return ((name, items, byte_text(size)) for name, (items, size) in counted.items())


def _rows(entries: "tuple[Entry, ...]") -> Iterator[tuple[str, str, str, str]]:
    return ((each.name, each.what, byte_text(each.bytes), each.file) for each in entries)
