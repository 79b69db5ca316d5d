"""Which directories are steps of a manager, and where each lies."""

import os
from pathlib import Path

import pytest

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.publish.steps import StepPaths, step_of

FOREIGN = [
    *("step_007", "step_", "step_-1", "step_5.tmp", "step_5\n", "Step_5", "xstep_5", "step_\u0665", "step_1e3"),
    *("iter_0000005", "release", f"step_{'9' * 19}"),
]


@pytest.mark.parametrize(("name", "step"), [("step_0", 0), ("step_7", 7), (f"step_{'9' * 18}", 10**18 - 1)])
def test_a_name_and_its_step(name: str, step: int) -> None:
    assert step_of(name) == step
    assert StepPaths("/run").path(step) == f"/run/{name}"
    assert StepPaths("/run", "trainer").path(step) == f"/run/{name}/trainer"


@pytest.mark.parametrize("name", FOREIGN)
def test_other_names_are_not_ours(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()

    assert step_of(name) is None
    assert StepPaths(str(tmp_path)).steps() == ()


@pytest.mark.parametrize("step", [-1, 10**18])
def test_a_number_that_names_no_step_is_refused(step: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{step} is no number of a step: give one from 0 to 9{{18}}$"):
        StepPaths("/run").path(step)


def test_steps_are_found_in_order_of_their_numbers(tmp_path: Path) -> None:
    for step in (10, 9, 100, 0):
        (tmp_path / f"step_{step}").mkdir()

    assert StepPaths(str(tmp_path)).steps() == (0, 9, 10, 100)
    assert StepPaths(str(tmp_path / "not there")).steps() == ()


@pytest.mark.parametrize("subdirectory", ["", "trainer"])
def test_files_and_links_are_not_ours(tmp_path: Path, subdirectory: str) -> None:
    (tmp_path / "other" / "step_1" / "trainer").mkdir(parents=True)
    run = tmp_path / "run"
    (run / "step_7" / subdirectory).mkdir(parents=True)
    (run / "step_1").symlink_to(tmp_path / "other" / "step_1")
    (run / "step_2").symlink_to("nowhere")
    (run / "step_3").write_bytes(b"")

    assert StepPaths(str(run), subdirectory).steps() == (7,)


def test_with_a_subdirectory_only_steps_that_have_it_count(tmp_path: Path) -> None:
    for name in ("step_1/trainer", "step_2/loader", "step_3"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "step_4").mkdir()
    (tmp_path / "step_4" / "trainer").symlink_to(tmp_path / "step_1" / "trainer")

    assert StepPaths(str(tmp_path), "trainer").steps() == (1,)


def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(NotADirectoryError):
        StepPaths(str(tmp_path / "file")).steps()


@pytest.mark.parametrize("subdirectory", [".", "..", "a/b", "../other", "/tmp", "a/", "a\0"])
def test_a_subdirectory_is_one_name(subdirectory: str) -> None:
    with pytest.raises(ConfigurationError, match="is not the name of one directory inside step_N: give a name without"):
        StepPaths("/run", subdirectory)


@pytest.mark.parametrize("directory", ["msc://profile/run", "msc:/profile/run"])
def test_steps_lie_on_a_file_system(directory: str) -> None:
    with pytest.raises(ConfigurationError, match="is no directory of a file system: name one that is"):
        StepPaths(directory)


def test_names_with_odd_characters_of_the_platform_do_no_harm(tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/step_\xff")

    assert StepPaths(str(tmp_path)).steps() == ()
