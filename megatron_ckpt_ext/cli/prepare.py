"""``megatron-ckpt prepare``: a prepared file from a checkpoint, and whether one fits a job."""

import argparse
from dataclasses import fields
from typing import Any

from megatron_ckpt_ext.cli.output import FOUND, GOOD, add_json, lines, print_json
from megatron_ckpt_ext.errors import ConfigurationError

__all__ = ["add_parser"]

DESCRIPTION = """\
Make the file for --ckpt-metadata from a complete checkpoint, so that no job has to create it: the layout of the
checkpoint, with head room for items whose length moves. It names no path of the checkpoint, and can be copied.

--check tells instead whether a prepared file fits a job with the given settings; those that are left out are not
compared, and a file made here knows only the number of ranks and of files a rank.

Exit code 0: written, or it fits. 1: it does not fit.
"""
SETTINGS = {
    "world_size": ("--world-size", "number of ranks"),
    "tensor_parallel": ("--tensor-model-parallel-size", "as in Megatron"),
    "pipeline_parallel": ("--pipeline-model-parallel-size", "as in Megatron"),
    "context_parallel": ("--context-parallel-size", "as in Megatron"),
    "expert_parallel": ("--expert-model-parallel-size", "as in Megatron"),
    "workers_per_rank": ("--dist-ckpt-workers", "as in Megatron: files of a rank"),
}


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "prepare",
        help="make a prepared file from a checkpoint",
        usage="megatron-ckpt prepare CHECKPOINT -o FILE [--no-slots] | prepare --check FILE [settings]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="a complete checkpoint")
    parser.add_argument("-o", "--output", metavar="FILE", help="the prepared file to write")
    parser.add_argument("--no-slots", action="store_true", help="keep every place as it is in the checkpoint")
    parser.add_argument("--check", metavar="FILE", help="a prepared file, or a checkpoint's .metadata")
    settings = parser.add_argument_group("settings of the job, for --check")
    for name, (flag, text) in SETTINGS.items():
        settings.add_argument(flag, dest=name, type=int, metavar="N", help=text)
    settings.add_argument("--ckpt-format", choices=("torch_dist", "fsdp_dtensor"), help="as in Megatron")
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Run the command."""
    if (options.check is None) == (options.checkpoint is None) or (options.checkpoint and not options.output):
        raise ConfigurationError("name a checkpoint and -o FILE to make one, or --check FILE to look at one")
    return _check(options) if options.check is not None else _prepare(options)


def _check(options: argparse.Namespace) -> int:
    from megatron_ckpt_ext.examine.prepare import fingerprint_differences
    from megatron_ckpt_ext.metadata.fingerprint import Fingerprint

    given = {each.name: getattr(options, each.name, None) for each in fields(Fingerprint)}
    differences = fingerprint_differences(options.check, Fingerprint(**given))
    if options.json:
        print_json({"path": options.check, "fits": not differences, "differences": list(map(str, differences))})
    else:
        lines(map(str, differences))
        lines([f"{options.check} {'does not fit' if differences else 'fits'}"])
    return FOUND if differences else GOOD


def _prepare(options: argparse.Namespace) -> int:
    from megatron_ckpt_ext.examine.prepare import prepare_file

    made = prepare_file(options.checkpoint, options.output, slots=not options.no_slots)
    ranks, workers = made.fingerprint.world_size, made.fingerprint.workers_per_rank
    if options.json:
        counted = {"ranks": ranks, "workers_per_rank": workers, "items": made.items}
        print_json({"path": made.path, **counted, "unslotted": list(made.unslotted)})
    else:
        lines(f"without head room: {name}" for name in made.unslotted)
        lines([f"{made.path}: {made.items} items for {ranks} ranks, {workers} files each"])
    return GOOD
