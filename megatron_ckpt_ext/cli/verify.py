"""``megatron-ckpt verify``: is a checkpoint, or every checkpoint of a run, complete and what was written?"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ckpt_ext.cli.output import FOUND, GOOD, add_json, byte_text, lines, print_json, table, tracked
from megatron_ckpt_ext.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron_ckpt_ext.examine.verdict import Verdict

__all__ = ["add_parser"]

DESCRIPTION = """\
Judge a checkpoint offline: .metadata is readable, every item has a place inside a file, the chunks of each tensor
cover it exactly once, the side files of the format are there, and no bytes of data files belong to no item.

--deep reads every item, on all cores: the checksums of its archive must hold, and its dtype and shape be those of
.metadata. --against also compares with a copy, item by item: two tensors that were exchanged are found by that only.

Exit code 0: nothing was found. 1: something was.
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "verify",
        help="judge whether a checkpoint is complete and intact",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint; with --all the directory of a run's steps")
    parser.add_argument("--deep", action="store_true", help="read every item and compare its checksums")
    parser.add_argument("--against", metavar="OTHER", help="a checkpoint that must hold the same content")
    parser.add_argument("--all", action="store_true", help="every iter_NNNNNNN and step_N in PATH")
    parser.add_argument("--subdirectory", metavar="NAME", help="with --all: steps are step_N/NAME")
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Run the command."""
    from megatron_ckpt_ext.examine.verdict import examine_checkpoint
    from megatron_ckpt_ext.publish.latest import all_steps

    if options.all and options.against is not None:
        raise ConfigurationError("--against compares one checkpoint and --all was given: leave one of the two out")
    paths = all_steps(options.path, subdirectory=options.subdirectory) if options.all else [options.path]
    if not paths:
        raise ConfigurationError(f"{options.path!r} holds no iter_NNNNNNN and no step_N: name the directory of a run")
    verdicts = [
        examine_checkpoint(
            path, deep=options.deep, against=options.against, watched=partial(tracked, what=f"reading {path}")
        )
        for path in paths
    ]
    if options.json:
        documents = [_document(each) for each in verdicts]
        print_json({"good": all(each.good for each in verdicts), "checkpoints": documents})
    else:
        _print(verdicts)
    return GOOD if all(each.good for each in verdicts) else FOUND


def _document(verdict: "Verdict") -> dict[str, Any]:
    report = verdict.report
    return {
        "path": report.path,
        "kind": report.kind,
        "complete": report.complete,
        "problems": list(report.problems),
        "problem_count": report.problem_count,
        "findings": list(verdict.findings),
        "finding_count": verdict.finding_count,
        "items": report.items,
        "files": report.files,
        "bytes": report.bytes,
        "items_read": verdict.items_read,
    }


def _print(verdicts: list["Verdict"]) -> None:
    if len(verdicts) > 1:
        rows = [
            (each.report.path, _state(each), each.report.items, each.report.files, byte_text(each.report.bytes))
            for each in verdicts
        ]
        table("Checkpoints", ("checkpoint", "state", "items", "files", "size"), rows)
    for verdict in verdicts:
        lines(_sentences(verdict, alone=len(verdicts) == 1))


def _state(verdict: "Verdict") -> str:
    if not verdict.report.complete:
        return "incomplete"
    return "good" if verdict.good else "damaged"


def _sentences(verdict: "Verdict", *, alone: bool) -> Iterator[str]:
    report = verdict.report
    for sentences, count in ((report.problems, report.problem_count), (verdict.findings, verdict.finding_count)):
        yield from (f"{report.path}: {sentence}" for sentence in sentences)
        if count > len(sentences):
            yield f"{report.path}: and {count - len(sentences)} more"
    if alone:
        read = f", {verdict.items_read} items read" if verdict.items_read else ""
        yield (
            f"{report.path}: {_state(verdict)}, {report.kind}, {report.items} items in {report.files} files, "
            f"{byte_text(report.bytes)}{read}"
        )
