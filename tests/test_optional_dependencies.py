"""The package and its offline commands work where an optional dependency is missing."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import iter_modules

import pytest

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ["nvidia_resiliency_ext", "transformer_engine", "matplotlib", "multistorageclient", "megatron.bridge"]

# What runs inside a training job only: these parts may need Megatron and NVRx when imported. Nothing else may.
INSIDE_A_JOB = ("commit", "compat", "emulation", "integrations", "plan", "strategy", "write")
# What runs inside a job of Megatron-Bridge only; tests/bridge imports it, where Bridge is.
IN_BRIDGE = ("megatron_ckpt_ext.integrations.bridge", "megatron_ckpt_ext.compat.bridge")

# A None in sys.modules is how Python marks a module that cannot be imported: `import`, `from ... import` and
# `importlib.util.find_spec` then all behave as if it were not installed.
SCRIPT = """
import importlib, sys
missing, modules = (argument.split(",") for argument in sys.argv[1:])
sys.modules.update(dict.fromkeys(missing))
for name in modules:
    importlib.import_module(name)
from megatron_ckpt_ext.cli.main import main
sys.argv[:] = ["megatron-ckpt", "--help"]
sys.exit(main())
"""


def modules_below(folder: Path, package: str) -> Iterator[str]:
    """Names all modules of a package without importing any of them."""
    yield package
    for module in iter_modules([str(folder)], f"{package}."):
        if module.ispkg:
            yield from modules_below(folder / module.name.rpartition(".")[2], module.name)
        else:
            yield module.name


ALL_MODULES = list(modules_below(ROOT / "megatron_ckpt_ext", "megatron_ckpt_ext"))
OFFLINE_MODULES = [name for name in ALL_MODULES if (name.split(".") + [""])[1] not in INSIDE_A_JOB]


def import_without(missing: list[str], modules: list[str], cwd: Path) -> None:
    """Imports the modules and asks for the command's help in a process of its own."""
    command = [sys.executable, "-c", SCRIPT, ",".join(missing), ",".join(modules)]
    env = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: megatron-ckpt" in done.stdout


@pytest.mark.parametrize("missing", OPTIONAL)
def test_offline_modules_and_help_without(missing: str, tmp_path: Path) -> None:
    import_without([missing], OFFLINE_MODULES, tmp_path)


def test_everything_with_nvrx_as_the_only_optional_one(tmp_path: Path) -> None:
    modules = [name for name in ALL_MODULES if not name.startswith(IN_BRIDGE)]
    import_without([name for name in OPTIONAL if name != "nvidia_resiliency_ext"], modules, tmp_path)


def test_the_offline_modules_are_among_those_tried() -> None:
    assert {"megatron_ckpt_ext.arguments.flags", "megatron_ckpt_ext.cli.main"} < set(OFFLINE_MODULES)
    assert any(name.startswith("megatron_ckpt_ext.metadata.") for name in OFFLINE_MODULES)


TRAINER = """
import sys
sys.modules.update(dict.fromkeys(["megatron", "nvidia_resiliency_ext"]))
import torch
from megatron_ckpt_ext import CheckpointManager
with CheckpointManager("checkpoints", async_save=True) as manager:
    manager.save(1, {"weight": torch.ones(3)})
    manager.wait()
    state = {"weight": torch.zeros(3)}
    assert manager.load(state) == 1
    assert state["weight"].sum() == 3
"""


def test_a_plain_trainer_needs_neither_megatron_nor_nvrx(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINER],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
