"""The command line flags, registered only where the parser lacks them.

Names follow Megatron-LM where Megatron-LM (or its open proposal) has one, so a later upstream release that
brings a flag itself meets no conflict. Values are primitive and equal on all ranks: Megatron pickles its
arguments into every checkpoint and compares them across ranks. A flag of ours that is not given leaves no trace in the
namespace, so a checkpoint of a job that does not use the extension is the same to the byte.
"""

import argparse
import contextlib
from dataclasses import dataclass
from typing import Any

__all__ = ["FLAGS", "Flag", "add_ckpt_ext_args"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag: its option string and the keywords of ``argparse.add_argument``."""

    option: str
    """The option string, with its dashes."""
    settings: dict[str, Any]
    """Keywords for ``argparse.ArgumentParser.add_argument``."""


FLAGS: tuple[Flag, ...] = (
    Flag(
        option="--async-save",
        settings={
            "action": "store_true",
            "default": False,
            "help": "Write checkpoints of torch_dist or fsdp_dtensor in the background while training goes on.",
        },
    ),
    Flag(
        option="--ckpt-metadata",
        settings={
            "metavar": "FILE",
            "help": (
                "Prepared metadata: saves follow the layout in FILE and need no object collectives. FILE is one "
                "made by --ckpt-metadata-create, or the .metadata of any checkpoint of the same job layout."
            ),
        },
    ),
    Flag(
        option="--ckpt-metadata-create",
        settings={
            "action": "store_true",
            "help": "Make the file of --ckpt-metadata in the first save, unless one that fits this job is there.",
        },
    ),
    Flag(
        option="--ckpt-metadata-on-drift",
        settings={
            "choices": ["rebuild", "fail"],
            "help": (
                "What a save does whose layout is not the prepared one: rebuild the metadata with all ranks in the "
                "same save (default), or fail on every rank without publishing anything."
            ),
        },
    ),
    Flag(
        option="--ckpt-save-timeout",
        settings={
            "type": float,
            "metavar": "SECONDS",
            "help": (
                "Give an asynchronous save up, on every rank, when a writer moves no byte for so long (default 1800). "
                "Given by itself it also guards saves without prepared metadata."
            ),
        },
    ),
    Flag(
        option="--ckpt-events",
        settings={
            "metavar": "FILE",
            "help": (
                "Append one JSON line for each phase of a save (plan, stage, commit, and rebuild where it drifted) to "
                "FILE.<rank>: seconds, collectives, and for a commit items and bytes."
            ),
        },
    ),
)


def add_ckpt_ext_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Register every flag of the package that ``parser`` does not know yet.

    Usable as Megatron's ``extra_args_provider``; calling it twice changes nothing. No collectives.

    Args:
        parser: the parser to extend, Megatron's own or a plain one.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("megatron-ckpt-ext")
    for flag in FLAGS:
        with contextlib.suppress(argparse.ArgumentError):
            group.add_argument(flag.option, **{"default": argparse.SUPPRESS, **flag.settings})
    return parser
