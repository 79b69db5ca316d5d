"""Two saves share no object that can change: no default, no attribute of a class."""

import ast
from pathlib import Path

import pytest
from scenes import Scenes

pytest_plugins = ["guarantee_jobs"]

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "megatron_ckpt_ext").rglob("*.py"), *(ROOT / "arguments").rglob("*.py")])
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "WeakSet", "WeakKeyDictionary"}


def is_empty(node: ast.expr | None) -> bool:
    """Whether it is to be filled: a container that is written out is a table."""
    parts = [*getattr(node, "elts", ()), *getattr(node, "keys", ()), *getattr(node, "args", ())]
    return not parts


def is_mutable(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        return name in MUTABLE_CALLS
    return isinstance(node, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def shared_state(tree: ast.Module) -> list[str]:
    """Mutable defaults of functions, mutable class attributes, and containers of a module that are to be filled."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            found += [ast.unparse(each) for each in defaults if each is not None and is_mutable(each)]
        elif isinstance(node, ast.ClassDef | ast.Module):
            for each in node.body:
                filled = isinstance(node, ast.ClassDef)
                if isinstance(each, ast.Assign | ast.AnnAssign) and is_mutable(each.value):
                    found += [ast.unparse(each)] if filled or is_empty(each.value) else []
    return [each for each in found if not each.startswith(("__all__", "__slots__"))]


def test_the_package_has_no_mutable_default_or_class_attribute() -> None:
    assert {str(path): found for path in SOURCES if (found := shared_state(ast.parse(path.read_text())))} == {}


@pytest.mark.parametrize(
    "text", ["def f(x={}): ...", "def f(*, x=list()): ...", "class C:\n    x: list[int] = []", "cache = dict()"]
)
def test_shared_state_is_found(text: str) -> None:
    assert len(shared_state(ast.parse(text))) == 1


def test_two_requests_share_nothing(scenes: Scenes) -> None:
    for shared, _ in scenes("two_requests"):
        assert shared == [0, 0]
