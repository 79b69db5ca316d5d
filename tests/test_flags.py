"""The command line flags: there where the parser lacks them, and nowhere twice."""

from argparse import SUPPRESS, ArgumentParser, Namespace
from typing import Any

import pytest
from ranks import RankPool

from megatron_ckpt_ext.arguments import add_ckpt_ext_args
from megatron_ckpt_ext.arguments.flags import FLAGS

CREATE = "--async-save --use-persistent-ckpt-worker --ckpt-metadata F --ckpt-metadata-create".split()
REUSE = "--async-save --use-persistent-ckpt-worker --ckpt-metadata F".split()
DEFAULTS = {"async_save": False, "ckpt_metadata": None, "ckpt_metadata_create": False, "ckpt_events": None}


def test_a_plain_parser_gets_every_flag() -> None:
    parser = ArgumentParser()

    assert add_ckpt_ext_args(parser) is parser
    assert vars(parser.parse_args([])) == DEFAULTS
    parsed = parser.parse_args(["--async-save", "--ckpt-metadata", "F", "--ckpt-metadata-create", "--ckpt-events", "E"])
    assert vars(parsed) == {
        "async_save": True,
        "ckpt_metadata": "F",
        "ckpt_metadata_create": True,
        "ckpt_events": "E",
    }


def test_calling_it_twice_changes_nothing() -> None:
    parser = add_ckpt_ext_args(ArgumentParser(prog="train"))
    once = parser.format_help()

    add_ckpt_ext_args(parser)

    assert parser.format_help() == once
    assert vars(parser.parse_args([])) == DEFAULTS


def test_every_flag_says_what_it_does() -> None:
    assert {flag.option for flag in FLAGS} == {"--" + name.replace("_", "-") for name in DEFAULTS}
    for flag in FLAGS:
        assert flag.option in add_ckpt_ext_args(ArgumentParser()).format_help()
        assert flag.settings["help"].endswith(".")


@pytest.mark.parametrize("option", [flag.option for flag in FLAGS])
def test_a_flag_that_is_there_stays_as_it_is(option: str) -> None:
    parser = ArgumentParser()
    parser.add_argument(option, nargs="?", const="theirs", default="their default", help=SUPPRESS)

    add_ckpt_ext_args(parser)

    name = option.removeprefix("--").replace("-", "_")
    assert getattr(parser.parse_args([]), name) == "their default"
    assert getattr(parser.parse_args([option]), name) == "theirs"
    assert vars(parser.parse_args([])).keys() == DEFAULTS.keys()


def test_values_are_primitive() -> None:
    """Megatron pickles its arguments into every checkpoint."""
    parser = add_ckpt_ext_args(ArgumentParser())
    parser.add_argument("--use-persistent-ckpt-worker", action="store_true")

    for value in vars(parser.parse_args(CREATE)).values():
        assert value is None or type(value) in (str, bool)


def _parse_on_rank(command_line: list[str], upstream_has_it: bool) -> dict[str, Any]:
    """Parse with Megatron's own parser, extended as its ``extra_args_provider`` extends it."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False))
    stock = set(vars(parser.parse_args([])))
    if upstream_has_it:
        parser.add_argument("--ckpt-metadata", default=None)
        parser.add_argument("--ckpt-metadata-create", action="store_true")
    parsed = vars(add_ckpt_ext_args(add_ckpt_ext_args(parser)).parse_args(command_line))
    names = DEFAULTS.keys() | {"use_persistent_ckpt_worker"}
    return {name: parsed[name] for name in names} | {"added": sorted(parsed.keys() - stock)}


@pytest.mark.parametrize("upstream_has_it", [False, True], ids=["today", "later"])
def test_upstreams_command_lines_parse_with_megatrons_parser(ranks: RankPool, upstream_has_it: bool) -> None:
    added = ["ckpt_events", "ckpt_metadata", "ckpt_metadata_create"]
    expected = {"async_save": True, "use_persistent_ckpt_worker": True, "ckpt_metadata": "F", "ckpt_events": None}

    created, reused, stock = (
        ranks.run(_parse_on_rank, command_line, upstream_has_it, world_size=1)[0]
        for command_line in (CREATE, REUSE, [])
    )

    assert created == {**expected, "ckpt_metadata_create": True, "added": added}
    assert reused == {**expected, "ckpt_metadata_create": False, "added": added}
    assert stock == {**DEFAULTS, "use_persistent_ckpt_worker": False, "added": added}


def test_upstreams_command_lines_parse_with_a_plain_parser() -> None:
    parser = add_ckpt_ext_args(ArgumentParser())
    parser.add_argument("--use-persistent-ckpt-worker", action="store_true")

    created, reused = parser.parse_args(CREATE), parser.parse_args(REUSE)

    assert created == Namespace(**{**vars(reused), "ckpt_metadata_create": True})
    assert reused.ckpt_metadata == "F" and reused.async_save
