"""``docs/guarantees.md`` has every guarantee, and every test that it names exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IDS = (
    *("H01", "H02", "H03", "H04", "H05", "H06", "H07", "H08", "H09", "H11", "H13", "H14"),
    *("L01", "L02", "L03", "L04", "L07", "L08", "L09", "L10", "L11", "L12", "L13", "L14", "L15", "L16", "L17", "L18"),
    *("G01", "G02", "G03", "G04", "G05", "G06", "G07", "G08", "G10", "G11", "G12", "G13", "G15", "G16", "G17", "G18"),
    *("G19", "G20", "R15", "T01", "T02", "T04", "T05", "T06", "T07", "T08", "T09", "T10", "C02", "C08"),
)
NAMED = re.compile(r"`((?:bridge/)?test_\w+\.py)::(test_\w+)`")


def rows() -> list[list[str]]:
    """Cells of each row of the table."""
    lines = (ROOT / "docs" / "guarantees.md").read_text().splitlines()
    table = [line for line in lines if re.match(r"\| [A-Z]\d\d \|", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_guarantee_has_one_row() -> None:
    assert [row[0] for row in rows()] == list(IDS)


def test_every_row_says_what_and_names_a_test_or_a_reason() -> None:
    for number, what, shown in rows():
        assert what, number
        assert NAMED.search(shown) or shown.startswith("none: "), number


def test_every_test_that_is_named_exists() -> None:
    named = {match.groups() for row in rows() for match in NAMED.finditer(row[2])}

    assert len(named) > len(IDS)
    assert sorted((file, name) for file, name in named if name not in names_in(file)) == []
