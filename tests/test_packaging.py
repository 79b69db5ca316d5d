"""What the distribution holds, and what importing the package does."""

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest

import megatron_ckpt_ext

ROOT = Path(__file__).resolve().parents[1]
FILES = ["LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"]
FOLDERS = ["arguments", "megatron_ckpt_ext"]


def run_python(*arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source: Path, into: Path) -> Path:
    run_python(
        *("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", into, source),
        cwd=into.parent,
    )
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is built from, since building leaves files behind."""
    copy = tmp_path_factory.mktemp("tree")
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tree, tmp_path_factory.mktemp("wheel") / "out")


def modules_of(tree: Path) -> set[str]:
    """Names the modules as a wheel should: `arguments` inside the package, and once."""
    package = {str(path.relative_to(tree)) for path in (tree / "megatron_ckpt_ext").rglob("*.py")}
    arguments = {f"megatron_ckpt_ext/{path.relative_to(tree)}" for path in (tree / "arguments").rglob("*.py")}
    return package | arguments


def test_wheel_holds_each_module_of_the_tree_once(tree: Path, wheel: Path) -> None:
    names = Counter(ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith(".py")} == modules_of(tree)
    assert names["megatron_ckpt_ext/arguments/flags.py"] == 1
    assert names["megatron_ckpt_ext/py.typed"] == 1
    assert set(names.values()) == {1}


def test_wheel_has_one_top_level_name(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in ZipFile(wheel).namelist()}
    assert tops == {"megatron_ckpt_ext", f"megatron_ckpt_ext-{megatron_ckpt_ext.__version__}.dist-info"}


def test_wheel_built_from_a_source_distribution_is_the_same(tree: Path, wheel: Path, tmp_path: Path) -> None:
    script = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    sdist = tmp_path / run_python("-c", script, cwd=tree).splitlines()[-1]
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    again = build_wheel(source, tmp_path / "out")
    assert sorted(ZipFile(again).namelist()) == sorted(ZipFile(wheel).namelist())


def test_wheel_installs_and_imports_on_its_own(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run_python("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    script = "import megatron_ckpt_ext.arguments.flags as flags; print(flags.__file__)"
    where = run_python("-c", script, cwd=tmp_path, env={"PYTHONPATH": str(site)})
    assert Path(where.strip()) == site / "megatron_ckpt_ext" / "arguments" / "flags.py"


def test_checkout_imports_through_pythonpath(tmp_path: Path) -> None:
    script = "import megatron_ckpt_ext.arguments.flags as flags; print(flags.__file__)"
    where = run_python("-c", script, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert Path(where.strip()) == ROOT / "megatron_ckpt_ext" / "arguments" / "flags.py"


def test_importing_the_package_imports_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys, megatron_ckpt_ext as m; dir(m); m.__version__; "
        "print(*sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'numpy', 'megatron'}))"
    )
    assert run_python("-c", script, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}).split() == []
