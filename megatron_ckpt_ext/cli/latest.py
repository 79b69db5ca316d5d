"""``megatron-ckpt latest``: the newest complete step of a run, and whether its trackers name it."""

import argparse
from typing import Any

from megatron_ckpt_ext.cli.output import FOUND, GOOD, add_json, lines, print_json
from megatron_ckpt_ext.errors import ConfigurationError

__all__ = ["add_parser"]

DESCRIPTION = """\
Find the newest complete checkpoint among iter_NNNNNNN and step_N in ROOT, and say which newer ones were passed over
and why. The trackers beside them (of Megatron-LM and Megatron-Bridge) should name it.

Exit code 0: there is one, and the trackers name it. 1: no step is complete, or a tracker is missing, torn or names
another one. Newer steps that are not complete alone are no reason for 1: a killed job leaves one.
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "latest",
        help="find the newest complete step",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", metavar="ROOT", help="directory of the steps, or msc://profile/prefix")
    parser.add_argument("--subdirectory", metavar="NAME", help="steps are step_N/NAME, of a CheckpointManager")
    parser.add_argument(
        "--fix-tracker", action="store_true", help="rewrite trackers that are wrong; while no job writes in ROOT"
    )
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Run the command."""
    from megatron_ckpt_ext.examine.trackers import find_tracker_faults, fix_trackers
    from megatron_ckpt_ext.publish.latest import latest_complete_step

    latest = latest_complete_step(options.root, subdirectory=options.subdirectory)
    try:
        faults = find_tracker_faults(options.root, latest)
        if options.fix_tracker:
            fix_trackers(faults)
    except OSError as error:
        raise ConfigurationError(
            f"a tracker in {options.root!r} cannot be read or written: {error.strerror}. Check its rights and disk"
        ) from error
    fixed = options.fix_tracker and bool(faults)
    if options.json:
        print_json(
            {
                "step": latest.step,
                "path": latest.path,
                "skipped": [{"path": each.path, "reason": each.reason} for each in latest.skipped],
                "trackers": [{"path": each.path, "problem": each.problem, "fixed": fixed} for each in faults],
            }
        )
    else:
        lines(f"skipped {each.path}: {each.reason}" for each in latest.skipped)
        verb = "fixed " if fixed else ""
        lines(f"{verb}{each.path} {each.problem}" for each in faults)
        lines([f"step {latest.step}: {latest.path}" if latest.path else f"no step in {options.root} is complete"])
    return GOOD if latest.path and (fixed or not faults) else FOUND
