"""The package never forks: a copy of a process that has threads, a GPU and gloo connections is not to be trusted.

A running job is watched in ``test_training_job.py``.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "megatron_ckpt_ext").rglob("*.py"), *(ROOT / "arguments").rglob("*.py")])
START_METHODS = {"get_context", "set_start_method"}
WITHOUT_A_CONTEXT = {"Process", "Pool", "Queue", "SimpleQueue", "JoinableQueue", "Manager", "Pipe", "Lock", "Event"}
"""Of ``multiprocessing`` itself they start, or are for, processes of the platform's start method: fork, before 3.14."""


def forks(tree: ast.Module) -> Iterator[str]:
    """Calls that fork, or may."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        first = node.args[0] if node.args else None
        spawns = isinstance(first, ast.Constant) and first.value == "spawn"
        if (
            last in {"fork", "forkpty", "ProcessPoolExecutor"}
            or (last in START_METHODS and not spawns)
            or (name.startswith(("multiprocessing.", "mp.")) and last in WITHOUT_A_CONTEXT)
        ):
            yield ast.unparse(node)


def test_the_package_starts_processes_by_spawn_only() -> None:
    assert {str(path): found for path in SOURCES if (found := list(forks(ast.parse(path.read_text()))))} == {}
    assert any('get_context("spawn")' in path.read_text() for path in SOURCES)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "os.fork()",
            "multiprocessing.get_context('fork')",
            "mp.get_context(method)",
            "multiprocessing.get_context()",
        ),
        *("mp.set_start_method('forkserver')", "multiprocessing.Process(target=f)", "mp.Queue()"),
    ],
)
def test_a_fork_is_found(text: str) -> None:
    assert list(forks(ast.parse(text))) == [ast.unparse(ast.parse(text, mode="eval"))]
