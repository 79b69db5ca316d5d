"""A trainer that is killed in any phase of an asynchronous save, with ``keep_last=1``, and started again.

The lives are in ``killed_trainer.py``: all are forks of one process, which imports once.
"""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from killed_trainer import FILES, FIRST, KILLED, REFERENCE, STEPS, Lived, Phase

HERE = Path(__file__).resolve().parent
DATA_FILES = tuple(f"__0_{number}.distcp" for number in range(FILES))
RESUMED_FROM = {
    Phase.STAGING: FIRST,
    Phase.WRITING: FIRST,
    Phase.WRITTEN: FIRST,
    Phase.PUBLISHED: KILLED,
    Phase.REMOVING: KILLED,
}


class Cells:
    """What the lives left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        first, second = json.loads((folder / "lives.json").read_text())
        self.first = {name: Lived(**fields) for name, fields in first.items()}
        self.second = {name: Lived(**fields) for name, fields in second.items()}

    def losses(self, name: str, which: str = "losses") -> dict[int, str]:
        """Step -> loss, exactly."""
        lines = (self.folder / name / which).read_text().splitlines()
        return {int(step): loss for step, loss, _ in map(str.split, lines)}

    def moments(self, name: str) -> list[tuple[str, str, int | None]]:
        """Event, file, and the newest complete step right before it, over both lives."""
        lines = (self.folder / name / "moments").read_text().splitlines()
        return [(event, file, newest) for event, file, newest in map(json.loads, lines)]

    def files(self, lived: Lived, step: int) -> set[str]:
        """Names of the files that a life left of a step."""
        return {Path(path).name for path in lived.files if path.startswith(f"step_{step}/")}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """All lives of all cells."""
    folder = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "killed_trainer.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return Cells(folder)


def test_the_reference_is_not_killed_and_keeps_the_last_step_only(cells: Cells) -> None:
    reference = cells.first[REFERENCE]

    assert (reference.exit_code, reference.newest) == (0, STEPS)
    assert reference.files.keys() == {f"step_{STEPS}/{name}" for name in (*DATA_FILES, ".metadata")}
    assert cells.losses(REFERENCE).keys() == set(range(1, STEPS + 1))


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
def test_the_fault_was_in_its_phase(cells: Cells, phase: Phase) -> None:
    killed = cells.first[phase.name]
    older, newer = (cells.files(killed, step) for step in (FIRST, KILLED))
    whole = {*DATA_FILES, ".metadata"}

    assert (cells.folder / phase.name / "fired").exists()
    assert killed.exit_code == -(signal.SIGXFSZ if phase is Phase.WRITING else signal.SIGKILL)
    assert killed.newest == RESUMED_FROM[phase]
    if phase is Phase.STAGING:
        assert (older, newer) == (whole, set())
    elif phase is Phase.WRITING:
        assert older == whole
        assert newer <= {*DATA_FILES}
        sizes = [(killed.files.get(f"step_{KILLED}/{name}", 0), killed.files[f"step_{FIRST}/{name}"]) for name in newer]
        assert any(0 < written < full for written, full in sizes)
    elif phase is Phase.WRITTEN:
        assert older == whole
        assert newer > {*DATA_FILES} and ".metadata" not in newer
        assert [killed.files[f"step_{KILLED}/{name}"] for name in DATA_FILES] == [
            killed.files[f"step_{FIRST}/{name}"] for name in DATA_FILES
        ]
    elif phase is Phase.PUBLISHED:
        assert older == newer == whole
    else:
        assert newer == whole
        assert len(older) == 1 and older < {*DATA_FILES}


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
def test_the_job_resumes_from_the_newest_complete_step_as_if_it_had_not_been_killed(cells: Cells, phase: Phase) -> None:
    resumed, expected = cells.losses(phase.name), cells.losses(REFERENCE)

    assert cells.second[phase.name].exit_code == 0
    assert min(resumed) == RESUMED_FROM[phase] + 1
    assert resumed == {step: expected[step] for step in range(min(resumed), STEPS + 1)}
    before = cells.losses(phase.name, "first losses")
    assert before == {step: expected[step] for step in before} and max(before) >= KILLED - 1


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
def test_what_the_resume_skips_is_told_with_its_reason(cells: Cells, phase: Phase) -> None:
    told = (cells.folder / phase.name / "log").read_text()

    skipped = f"WARNING the checkpoint {cells.folder / phase.name / 'checkpoints'}/step_{KILLED} is passed over: "
    if phase in (Phase.WRITING, Phase.WRITTEN):
        assert told == f"{skipped}.metadata is missing: no save was finished in this directory\n"
    else:
        assert told == ""


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
def test_there_is_a_complete_step_at_every_moment_after_the_first(cells: Cells, phase: Phase) -> None:
    moments = cells.moments(phase.name)
    newest = [newest for _, _, newest in moments]

    published = newest.index(FIRST)
    assert set(newest[:published]) == {None}
    assert None not in newest[published:]
    assert ("os.rename", ".metadata", None) in moments[:published]
    assert all(before <= after for before, after in pairwise(filter(None, newest)))  # it never goes back


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
def test_nothing_is_left_of_the_killed_life(cells: Cells, phase: Phase) -> None:
    assert cells.second[phase.name].newest == STEPS
    assert cells.second[phase.name].files.keys() == cells.first[REFERENCE].files.keys()
