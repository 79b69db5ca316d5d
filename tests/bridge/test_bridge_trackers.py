"""Bridge's trackers appear whole, and after what a resumed job reads with them."""

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("megatron.bridge", reason="make bridge installs it")

from megatron_ckpt_ext.compat.bridge import TRACKERS
from megatron_ckpt_ext.integrations.bridge.trackers import moving_last, whole_trackers

STATE, NAMES = TRACKERS


def writing_module(folder: Path) -> Any:
    """A module with a finalizer that writes as Bridge's does: copy, open, and the configuration at the end."""
    module: Any = ModuleType("writing")
    module.shutil, module.folder = shutil, folder
    source = f"""
def finalize():
    shutil.copy(folder / "train_state.pt", folder / "{STATE}")
    with open(folder / "{NAMES}", "w") as file:
        file.write("8")
    with open(folder / "run_config.yaml", "w") as file:
        file.write(seen())
"""
    exec(source, vars(module))
    module.seen = lambda: ",".join(sorted(path.name for path in folder.iterdir() if path.name.startswith("latest")))
    (folder / "train_state.pt").write_bytes(b"state")
    return module


def contents(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in TRACKERS if (folder / name).exists()}


def test_trackers_come_after_the_configuration(tmp_path: Path) -> None:
    module = writing_module(tmp_path)

    moving_last(module.finalize, module)()

    assert contents(tmp_path) == {STATE: "state", NAMES: "8"}
    assert (tmp_path / "run_config.yaml").read_text() == ""
    assert "open" not in vars(module)
    assert module.shutil is shutil


def test_a_finalizer_that_fails_leaves_the_old_trackers(tmp_path: Path) -> None:
    module = writing_module(tmp_path)
    for name in TRACKERS:
        (tmp_path / name).write_text("old")
    module.seen = lambda: str(8 // 0)

    with pytest.raises(ZeroDivisionError):
        moving_last(module.finalize, module)()

    assert contents(tmp_path) == {STATE: "old", NAMES: "old"}
    assert "open" not in vars(module)


def test_a_tracker_is_replaced_whole(tmp_path: Path) -> None:
    module = writing_module(tmp_path)
    (tmp_path / NAMES).write_text("4")
    (tmp_path / STATE).write_text("older")
    first = (tmp_path / STATE).stat().st_ino

    with whole_trackers(module):
        module.finalize()

    assert contents(tmp_path) == {STATE: "state", NAMES: "8"}
    assert (tmp_path / STATE).stat().st_ino != first  # a file in its place, not its content
    assert {path.name for path in tmp_path.iterdir()} == {*TRACKERS, "train_state.pt", "run_config.yaml"}


def test_other_files_are_copied_and_opened_as_ever(tmp_path: Path) -> None:
    module = writing_module(tmp_path)

    with whole_trackers(module):
        module.shutil.copy(tmp_path / "train_state.pt", tmp_path / "copy")
        assert module.shutil.rmtree is shutil.rmtree
        with module.open(tmp_path / "copy") as file:
            assert file.read() == "state"
        with module.open(tmp_path / "written", "w") as file:
            assert (tmp_path / "written").exists()
    assert (tmp_path / "copy").read_bytes() == b"state"
