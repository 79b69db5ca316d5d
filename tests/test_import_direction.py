"""Who may import whom in the package, and where private names of other projects may be touched; read from the source.

The stages of a save are arguments -> config -> strategy -> plan -> write -> commit -> publish. An arrow of that flow is
an import against it: whoever runs later is the lower layer, or is handed over as an argument. The rows below say it
stage by stage, lowest first, and a row may only name rows above it, so there are no cycles.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_ckpt_ext"
FOREIGN = ("torch", "megatron", "nvidia_resiliency_ext")
"""Projects whose private names only ``compat`` and ``emulation`` may touch."""
TOUCHES_PRIVATE_NAMES = ("compat", "emulation")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A module or folder of the package, what it may import of the package, and why."""

    name: str
    may: tuple[str, ...] = ()
    why: str


ROWS = (
    Row(name="errors", why="Everybody raises them, so they know nobody."),
    Row(name="replacements", why="Putting names in place and back knows no names of ours."),
    Row(name="arguments", why="Flags are data for a parser; the offline commands read them without torch."),
    Row(name="compat", may=("errors", "replacements"), why="Foreign names, for everybody above."),
    Row(name="config", may=("errors",), why="Settings are checked before anything is built from them."),
    Row(name="events", may=("errors",), why="A record of what others did: it decides nothing."),
    Row(name="collectives", may=("compat",), why="Counting sees torch only, so it can count anybody."),
    Row(
        name="metadata",
        may=("compat", "errors"),
        why="Files, slices and comparison: data, no collectives, no I/O of saves.",
    ),
    Row(name="publish.storage", may=("compat",), why="Files and objects as bytes; it does not know what is in them."),
    Row(
        name="publish.atomic", may=("publish.storage",), why="Makes files appear and go, whatever storage they are in."
    ),
    Row(
        name="publish.clean",
        may=("compat", "metadata", "publish.storage"),
        why="Makes room for a save by what file names tell; it opens nothing.",
    ),
    Row(
        name="publish",
        may=("compat", "errors", "metadata", "publish.storage"),
        why="Judges what is complete by what its metadata says; it reads, and no save waits for it.",
    ),
    Row(
        name="examine",
        may=(
            *("collectives", "compat", "errors", "events", "metadata"),
            *("publish", "publish.atomic", "publish.storage"),
        ),
        why="Answers operators offline: it reads what others published, and no save knows it.",
    ),
    Row(
        name="staging",
        may=("compat", "errors"),
        why="Copies a state dict into host memory; it knows no files and no ranks.",
    ),
    Row(
        name="write",
        may=("compat", "errors", "metadata", "publish.atomic"),
        why="Runs in another process: it compares and makes files durable there, and knows no plan and no vote.",
    ),
    Row(
        name="plan",
        may=("compat", "errors", "metadata", "publish.clean"),
        why="Starts a save; of publishing it only takes back what an earlier save had left in the directory.",
    ),
    Row(
        name="commit",
        may=("compat", "errors", "metadata", "plan", "publish.atomic", "write"),
        why="Ends what the plan began and the writer wrote, so it reads the result of both; its queue owns the writer.",
    ),
    Row(
        name="strategy",
        may=("commit", "compat", "errors", "metadata", "plan", "write"),
        why="Joins plan, write and commit behind Megatron's interface.",
    ),
    Row(
        name="manager",
        may=(
            *("collectives", "commit", "compat", "errors", "events", "metadata", "publish"),
            *("staging", "strategy", "write"),
        ),
        why="Joins staging, a saver and retention for trainers without a framework.",
    ),
    Row(
        name="emulation", may=("compat", "errors", "replacements"), why="A CPU in CUDA's clothes knows no checkpoints."
    ),
    Row(
        name="integrations",
        may=(
            *("arguments", "collectives", "commit", "compat", "config", "errors"),
            *("events", "metadata", "plan", "publish", "publish.atomic", "replacements", "strategy", "write"),
        ),
        why="Puts the package into a framework, so it may see every stage.",
    ),
    Row(
        name="launch",
        may=("compat", "emulation", "errors", "integrations"),
        why="A rank of a job: it installs, then runs the user's script.",
    ),
    Row(name="__init__", may=("*",), why="The public names, each imported when it is asked for."),
    Row(name="cli", may=("*",), why="The commands see everything, and nothing imports them."),
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One module of the package."""

    path: Path
    name: str
    """Dotted, without the package's name."""
    tree: ast.Module

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and dotted name of each absolute import, wherever in the file it stands."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)

    def at(self, line: int, what: str) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}: {what}"


def sources() -> list[Source]:
    folders = {ROOT / PACKAGE: "", ROOT / "arguments": "arguments"}
    found = []
    for folder, prefix in folders.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [prefix, *path.relative_to(folder).with_suffix("").parts]
            name = ".".join(part for part in parts if part)
            found.append(Source(path=path, name=name.removesuffix(".__init__"), tree=ast.parse(path.read_text())))
    return found


SOURCES = sources()


def row_of(name: str) -> Row | None:
    """The most specific row that a dotted name of the package falls under."""
    rows = [row for row in ROWS if name == row.name or name.startswith(row.name + ".")]
    return max(rows, key=lambda row: len(row.name), default=None)


def imported_rows(source: Source) -> Iterator[tuple[int, Row]]:
    for line, name in source.imports():
        head, _, rest = name.partition(".")
        if head == PACKAGE:
            row = row_of(rest) or row_of("__init__")
            assert row is not None
            yield line, row


def test_every_module_has_a_row() -> None:
    assert [source.name for source in SOURCES if row_of(source.name) is None] == []
    assert {"arguments.flags", "metadata.guard", "commit", "__init__"} <= {source.name for source in SOURCES}


def test_rows_name_only_rows_above_them() -> None:
    above: set[str] = set()
    for row in ROWS:
        assert set(row.may) <= above | {"*"}, row
        above.add(row.name)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_imports_keep_the_direction(source: Source) -> None:
    own = row_of(source.name)
    assert own is not None
    wrong = [
        source.at(line, f"{own.name} may not import {row.name}. {own.why}")
        for line, row in imported_rows(source)
        if row.name != own.name and row.name not in own.may and "*" not in own.may
    ]
    assert wrong == []


def test_arguments_are_imported_where_a_job_begins_only() -> None:
    users = {
        own.name
        for source in SOURCES
        if (own := row_of(source.name))
        for _, row in imported_rows(source)
        if row.name == "arguments"
    }
    assert users - {"arguments"} <= {"integrations", "launch", "cli", "__init__"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_imports(source: Source) -> Iterator[str]:
    for line, name in source.imports():
        parts = name.split(".")
        if parts[0] in FOREIGN and any(is_private(part) for part in parts):
            yield source.at(line, f"imports {name}")


def private_attributes(source: Source) -> Iterator[str]:
    """Such as ``dist.distributed_c10d._world``, where ``dist`` is bound by an import of a foreign project."""
    bound = foreign_names(source)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in bound:
                yield source.at(node.lineno, f"reads {ast.unparse(node)}")


def foreign_names(source: Source) -> set[str]:
    bound = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                origin = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
                if origin.split(".")[0] in FOREIGN:
                    bound.add(alias.asname or alias.name.split(".")[0])
    return bound


def test_private_names_of_others_stay_in_their_place() -> None:
    touching = [source for source in SOURCES if source.name.split(".")[0] in TOUCHES_PRIVATE_NAMES]
    others = [source for source in SOURCES if source not in touching]

    assert [each for source in others for each in (*private_imports(source), *private_attributes(source))] == []
    assert [each for source in touching for each in private_imports(source)] != []


def test_a_private_name_is_found_however_it_is_reached() -> None:
    lines = [
        "import torch.distributed as dist; dist.distributed_c10d._world",
        "from torch.distributed import distributed_c10d; distributed_c10d._world.pg_map",
        "from torch.distributed.checkpoint.utils import _DistWrapper",
        "import megatron._private",
        "def f() -> None:\n    import torch\n    torch.cuda._lazy_init()",
    ]
    harmless = "import torch\ntorch.__version__\nself._own\nfrom json import _default_decoder"
    for text in lines:
        source = Source(path=ROOT / "x.py", name="x", tree=ast.parse(text))
        assert [*private_imports(source), *private_attributes(source)] != [], text
    source = Source(path=ROOT / "x.py", name="x", tree=ast.parse(harmless))
    assert [*private_imports(source), *private_attributes(source)] == []


@pytest.mark.parametrize("statement", [ast.Assert, ast.Global], ids=["assert", "global"])
def test_the_package_has_no(statement: type[ast.stmt]) -> None:
    found = [
        source.at(node.lineno, ast.unparse(node))
        for source in SOURCES
        for node in ast.walk(source.tree)
        if isinstance(node, statement)
    ]
    assert found == []


def test_imports_are_absolute() -> None:
    relative = [
        source.at(node.lineno, ast.unparse(node))
        for source in SOURCES
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert relative == []
