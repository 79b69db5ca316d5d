"""``megatron-ckpt``: the command line and what an operator sees when a command cannot do what was asked."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NoReturn

from megatron_ckpt_ext.cli import diff, inspect, latest, prepare, report, run, verify
from megatron_ckpt_ext.errors import ConfigurationError, PreparedFileError
from megatron_ckpt_ext.examine.bounded import bounded_memory

__all__ = ["main"]


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaint is one line and points to the help."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 2 for bad input, otherwise the command's own."""
    parser = OneLineParser(
        prog="megatron-ckpt", description="Asynchronous Megatron checkpoints without object gathers."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run.add_parser(commands)
    for command in (inspect, verify, diff, prepare, latest, report):
        command.add_parser(commands)
    options = parser.parse_args(argv)
    try:
        with nullcontext() if options.command == "run" else bounded_memory():
            code: int = options.execute(options)
    except (ConfigurationError, PreparedFileError) as error:
        print(f"megatron-ckpt {options.command}: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
