"""The documentation: links lead somewhere, commands are commands, and no warning is without a word on it."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ckpt_ext.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").glob("*.md")])
LINK = re.compile(r"\]\(([^)#]*)(#[^)]*)?\)")
PLACEHOLDER = re.compile(r"%[sdr]|%\.\d+f")
COMMANDS = ("inspect", "verify", "diff", "prepare", "latest", "report")


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    targets = [target for target, _ in LINK.findall(page.read_text()) if "://" not in target and target]

    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_pages_are_linked_from_the_readme_or_from_one_that_is() -> None:
    linked = {
        (page.parent / target).resolve() for page in PAGES for target, _ in LINK.findall(page.read_text()) if target
    }

    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.resolve() not in linked] == []


def offline_commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for line in page.read_text().replace("\\\n", " ").splitlines():
            words = line.strip().partition("  #")[0]
            if line.startswith("    megatron-ckpt") and words.split()[1] in COMMANDS:
                yield page.name, shlex.split(words)[1:]


@pytest.mark.parametrize(
    "command", [pytest.param(words, id=f"{page}-{words[0]}") for page, words in offline_commands()]
)
def test_the_commands_of_a_page_are_understood(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Their paths are examples: a command that is understood says that there is nothing, and not how it is used."""
    try:
        code = main(command)
    except SystemExit as end:
        pytest.fail(f"{command} is no command: {end.code}")
    assert code in (1, 2)
    assert "--help" not in capsys.readouterr().err


def warnings() -> Iterator[tuple[str, str]]:
    """Where a warning is logged, and the longest part of it that is always the same."""
    for path in sorted((ROOT / "megatron_ckpt_ext").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "logger.warning":
                form = node.args[0]
                parts = (
                    PLACEHOLDER.split(form.value)
                    if isinstance(form, ast.Constant) and isinstance(form.value, str)
                    else []
                )
                if longest := max(map(str.strip, map(str, parts)), key=len, default="").strip(".:, "):
                    yield f"{path.name}:{node.lineno}", longest


def test_every_warning_is_explained() -> None:
    explained = one_line((ROOT / "docs" / "operating.md").read_text())

    found = list(warnings())
    assert len(found) > 15
    assert [(where, words) for where, words in found if one_line(words) not in explained] == []
