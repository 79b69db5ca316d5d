"""What the file system would refuse on every rank is refused before any is started, and nothing is left behind."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from megatron_ckpt_ext.cli.folders import events_refusal, unwritable_refusal
from megatron_ckpt_ext.cli.main import main

MEGATRON = ["--micro-batch-size", "2"]
NOBODY = 65534


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder that this process may not write to, also where the tests run as root."""
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        me = os.geteuid()
        if me == 0:
            os.seteuid(NOBODY)
        yield Path(folder)
        if me == 0:
            os.seteuid(me)


@pytest.mark.parametrize("below", ["", "run7", "run7/checkpoints"])
def test_a_save_directory_that_cannot_be_made_is_refused(read_only: Path, below: str) -> None:
    refusal = unwritable_refusal([*MEGATRON, "--save", str(read_only / below)])

    assert refusal and refusal.startswith(f"--save {read_only / below} cannot be made or written, ")
    assert f"may not write in {read_only}: " in refusal


def test_other_scripts_other_storage_and_jobs_that_save_nothing_are_not_hindered(read_only: Path) -> None:
    place = str(read_only / "run7")
    for words in (
        ["--save", place],
        [*MEGATRON, "--load", place],
        [*MEGATRON, "--save", place, "--skip-train"],
        [*MEGATRON, "--save", f"msc://{place}"],
    ):
        assert unwritable_refusal(words) is None, words


def test_a_save_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    for place in (file, file / "checkpoints"):
        refusal = unwritable_refusal([*MEGATRON, f"--save={place}"])
        assert refusal == f"--save {place} needs a directory, but {file} is a file: name another directory."


def test_a_save_directory_that_is_not_there_yet_is_left_to_megatron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path, tmp_path / "a" / "b", Path("a"), Path(".")):
        assert unwritable_refusal([*MEGATRON, "--save", str(place)]) is None
    assert list(tmp_path.iterdir()) == []


def test_events_need_a_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for fits in (tmp_path / "events", Path("events")):
        assert events_refusal([*MEGATRON, "--ckpt-events", str(fits)]) is None
    missing = tmp_path / "none" / "events"
    assert events_refusal(["--ckpt-events", str(missing)]) is None  # not Megatron's script

    refusal = events_refusal([*MEGATRON, "--ckpt-events", str(missing)])

    assert refusal and f"is in {missing.parent}, which is no existing directory" in refusal


@pytest.mark.parametrize("dry", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--save", "{folder}/train.py"], "is a file: name another directory."),
        (["--ckpt-events", "{folder}/none/events"], "which is no existing directory: make that first"),
    ],
)
def test_it_is_one_line_and_exit_code_2_and_the_script_does_not_run(
    tmp_path: Path, dry: list[str], arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('it ran')")
    words = [word.format(folder=tmp_path) for word in arguments]

    code = main(["run", *dry, "--cpu", "--nproc", "2", str(script), *MEGATRON, *words])

    told = capsys.readouterr()
    assert code == 2
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("megatron-ckpt run: ") and line.endswith(".") and complaint in line
    assert list(tmp_path.iterdir()) == [script]
