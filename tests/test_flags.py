"""The command line flags: there where the parser lacks them, and nowhere twice."""

from argparse import SUPPRESS, ArgumentParser, Namespace
from typing import Any

import pytest
from ranks import RankPool

from megatron_ckpt_ext.arguments import add_ckpt_ext_args
from megatron_ckpt_ext.arguments.flags import FLAGS

CREATE = "--async-save --use-persistent-ckpt-worker --ckpt-metadata F --ckpt-metadata-create".split()
REUSE = "--async-save --use-persistent-ckpt-worker --ckpt-metadata F".split()
OURS = {
    "ckpt_metadata": "F",
    "ckpt_metadata_create": True,
    "ckpt_metadata_on_drift": "fail",
    "ckpt_save_timeout": 90.5,
    "ckpt_events": "E",
}
"""Our flags, and a value of each that is not its default."""
ALL = (
    "--ckpt-metadata F --ckpt-metadata-create --ckpt-metadata-on-drift fail --ckpt-save-timeout 90.5 --ckpt-events E"
).split()
UNSET = {"async_save": False}
"""What is left of flags that are not given: the one that Megatron has too."""


def test_a_plain_parser_gets_every_flag() -> None:
    parser = ArgumentParser()

    assert add_ckpt_ext_args(parser) is parser
    assert vars(parser.parse_args(["--async-save", *ALL])) == {"async_save": True, **OURS}


def test_a_flag_that_is_not_given_leaves_no_trace() -> None:
    """Megatron pickles its arguments into every checkpoint: without our flags it is the stock one to the byte."""
    parser = add_ckpt_ext_args(ArgumentParser())

    assert vars(parser.parse_args([])) == UNSET
    for number, name in enumerate(OURS):
        words = ALL[: ALL.index("--" + name.replace("_", "-"))]
        assert vars(parser.parse_args(words)).keys() == {*UNSET, *list(OURS)[:number]}


def test_calling_it_twice_changes_nothing() -> None:
    parser = add_ckpt_ext_args(ArgumentParser(prog="train"))
    once = parser.format_help()

    add_ckpt_ext_args(parser)

    assert parser.format_help() == once
    assert vars(parser.parse_args([])) == UNSET


def test_every_flag_says_what_it_does() -> None:
    assert {flag.option for flag in FLAGS} == {"--" + name.replace("_", "-") for name in ("async_save", *OURS)}
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
    assert vars(parser.parse_args([])).keys() == UNSET.keys() | {name}


def test_values_are_primitive() -> None:
    """Megatron pickles its arguments into every checkpoint."""
    parser = add_ckpt_ext_args(ArgumentParser())
    parser.add_argument("--use-persistent-ckpt-worker", action="store_true")

    for command_line in (CREATE, ALL):
        assert {type(value) for value in vars(parser.parse_args(command_line)).values()} <= {str, bool, float}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--ckpt-metadata-on-drift", "ignore"], "argument --ckpt-metadata-on-drift: invalid choice: 'ignore'"),
        (["--ckpt-save-timeout", "soon"], "argument --ckpt-save-timeout: invalid float value: 'soon'"),
        (["--ckpt-metadata"], "argument --ckpt-metadata: expected one argument"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_value_that_makes_no_sense_is_refused(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        add_ckpt_ext_args(ArgumentParser()).parse_args(words)

    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def _parse_on_rank(command_line: list[str], upstream_has_it: bool) -> dict[str, Any]:
    """Parse with Megatron's own parser, extended as its ``extra_args_provider`` extends it."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False))
    stock = set(vars(parser.parse_args([])))
    if upstream_has_it:
        parser.add_argument("--ckpt-metadata", default=None)
        parser.add_argument("--ckpt-metadata-create", action="store_true")
    parsed = vars(add_ckpt_ext_args(add_ckpt_ext_args(parser)).parse_args(command_line))
    shared = {name: parsed[name] for name in ("async_save", "use_persistent_ckpt_worker")}
    return shared | {name: value for name, value in parsed.items() if name not in stock}


@pytest.mark.parametrize("upstream_has_it", [False, True], ids=["today", "later"])
def test_upstreams_command_lines_parse_with_megatrons_parser(ranks: RankPool, upstream_has_it: bool) -> None:
    theirs = {"ckpt_metadata": None, "ckpt_metadata_create": False} if upstream_has_it else {}
    given = {"async_save": True, "use_persistent_ckpt_worker": True, **theirs, "ckpt_metadata": "F"}

    created, reused, stock = (
        ranks.run(_parse_on_rank, command_line, upstream_has_it, world_size=1)[0]
        for command_line in (CREATE, REUSE, [])
    )

    assert created == {**given, "ckpt_metadata_create": True}
    assert reused == given
    assert stock == {"async_save": False, "use_persistent_ckpt_worker": False, **theirs}


def test_upstreams_command_lines_parse_with_a_plain_parser() -> None:
    parser = add_ckpt_ext_args(ArgumentParser())
    parser.add_argument("--use-persistent-ckpt-worker", action="store_true")

    created, reused = parser.parse_args(CREATE), parser.parse_args(REUSE)

    assert "ckpt_metadata_create" not in vars(reused)
    assert created == Namespace(**vars(reused), ckpt_metadata_create=True)
    assert reused.ckpt_metadata == "F" and reused.async_save
