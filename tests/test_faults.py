"""Faults in every phase of a save: no hang, the newest complete checkpoint is whole, and a new job goes on.

The everyday run has a selection; ``make faults`` runs all cells, prints the table and keeps it in ``docs/faults.md``.
Limits: two ranks (a selection at four), one machine, gloo, small states, page cache and tmpfs in the place of a
parallel file system.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from fault_jobs import FIRED, Found, die, process_state, resume_on_rank, survive_on_rank
from fault_matrix import CELLS, SIGNALS, Actor, Cell, Fault, Phase
from ranks import RankPool
from rich.console import Console
from rich.table import Table

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "faults.md"
JOB_SECONDS = 60.0
"""A job that has not ended by then hangs."""
WRITER_SECONDS = 20.0
"""How long a writer may outlive its trainer."""
EVERYDAY = {
    Cell(actor=Actor.TRAINER, fault=Fault.KILL, phase=Phase.WRITING),
    Cell(actor=Actor.TRAINER, fault=Fault.KILL, phase=Phase.RENAME),
    Cell(actor=Actor.WRITER, fault=Fault.KILL, phase=Phase.STAGING),
    Cell(actor=Actor.WRITER, fault=Fault.STOP, phase=Phase.WRITING),
}
EVERYDAY |= {cell for cell in CELLS if cell.fault not in SIGNALS and not cell.expected.job_ends}
AT_FOUR_RANKS = (
    Cell(actor=Actor.TRAINER, fault=Fault.EXCEPTION, phase=Phase.PLANNING),
    Cell(actor=Actor.TRAINER, fault=Fault.READ_ONLY, phase=Phase.RENAME),
    Cell(actor=Actor.TRAINER, fault=Fault.EXCEPTION, phase=Phase.TRACKER),
    Cell(actor=Actor.WRITER, fault=Fault.KILL, phase=Phase.STAGING),
    Cell(actor=Actor.WRITER, fault=Fault.KILL, phase=Phase.WRITING),
    Cell(actor=Actor.WRITER, fault=Fault.STOP, phase=Phase.WRITING),
    Cell(actor=Actor.WRITER, fault=Fault.EXCEPTION, phase=Phase.WRITING),
    Cell(actor=Actor.WRITER, fault=Fault.KILL, phase=Phase.VOTE),
)
NO_MOUNT = "no tmpfs can be mounted here"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended."""

    codes: tuple[int | None, int | None]
    """Exit code of each rank; ``None``: it did not end by itself."""
    seconds: float
    """From the fault to the end of the other rank."""
    writers_left: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell that ran."""

    cell: Cell
    found: Sequence[Found]
    ended: Ended | None = None

    @cached_property
    def faults(self) -> list[str]:
        """What is not as it must be."""
        expected = self.cell.expected
        first = self.found[0]
        checks = {
            "the fault did not fire": all(each.fired for each in self.found),
            f"newest complete step is {first.newest}, not {expected.newest}": first.newest == expected.newest,
            "the newest complete checkpoint does not hold what was saved": all(each.intact for each in self.found),
            f"the tracker names step {first.tracker}": first.tracker in (1, first.newest),
            "a new job cannot save": all(each.resumed == 9 for each in self.found),
        }
        checks |= self._job_goes_on() if self.ended is None else self._job_ended(self.ended)
        return [text for text, holds in checks.items() if not holds]

    def _job_goes_on(self) -> dict[str, bool]:
        errors = {each.error for each in self.found}
        cause = self.cell.expected.error
        right = errors == {None} if cause is None else all(error and cause in error for error in errors)
        return {
            f"errors are {errors}": right and len(errors) == 1,
            "the job cannot save any more": all(each.went_on is not None for each in self.found),
        }

    def _job_ended(self, ended: Ended) -> dict[str, bool]:
        bad = self.cell.rank
        own = {Fault.KILL: -signal.SIGKILL, Fault.STOP: None}.get(self.cell.fault, 1)
        return {
            f"exit codes are {ended.codes}": ended.codes[bad] == own and ended.codes[1 - bad] not in (0, None),
            f"{ended.writers_left} writers are left": ended.writers_left == 0,
        }

    @property
    def text(self) -> str:
        """What happened, for the table."""
        first = self.found[0]
        resumed = f"newest complete: step {first.newest}, intact; new job saves"
        if self.ended is not None:
            return f"job ended after {self.ended.seconds:.0f} s, codes {self.ended.codes}; {resumed}"
        outcome = "save succeeds" if first.error is None else first.error.partition(". ")[2]
        return f"{outcome}; job goes on; {resumed} ({first.seconds:.0f} s in all)"


@contextmanager
def small_file_systems(cells: Sequence[Cell], parent: Path) -> Iterator[list[tuple[Cell, str]]]:
    """A tmpfs for each cell. Needs root."""
    placed = []
    try:
        for number, cell in enumerate(cells):
            directory = parent / f"cell_{number}"
            directory.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", directory], check=True)
            placed.append((cell, str(directory)))
        yield placed
    finally:
        for _, directory_name in placed:
            subprocess.run(["umount", "-l", directory_name], check=False)


def run_cells(ranks: RankPool, cells: Sequence[Cell], parent: Path) -> list[Row]:
    """Run cells: those after which the job goes on in one job, the others each in a job of its own."""
    with small_file_systems(cells, parent) as placed:
        going_on = [(cell, path) for cell, path in placed if not cell.expected.job_ends]
        ending = [(cell, path) for cell, path in placed if cell.expected.job_ends]
        found = ranks.run(survive_on_rank, going_on, timeout=60 + 10 * len(going_on))
        rows = [Row(cell=cell, found=each) for (cell, _), each in zip(going_on, zip(*found, strict=True), strict=True)]
        ends = [run_to_its_end(cell, path) for cell, path in ending]
        found = ranks.run(resume_on_rank, ending, timeout=60)
        for (cell, _), each, ended in zip(ending, zip(*found, strict=True), ends, strict=True):
            rows.append(Row(cell=cell, found=each, ended=ended))
    return rows


def run_to_its_end(cell: Cell, directory: str) -> Ended:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fault_jobs"])
    job = [context.Process(target=die, args=(rank, cell, directory)) for rank in (0, 1)]
    for process in job:
        process.start()
    healthy = job[1 - cell.rank]
    healthy.join(JOB_SECONDS)
    job[cell.rank].join(1.0)
    codes = (job[0].exitcode, job[1].exitcode)
    note = Path(f"{directory}.{FIRED}")
    seconds = time.time() - note.stat().st_mtime if note.exists() else 0.0
    for process in job:  # as a launcher does with the ranks that are left
        process.kill()
        process.join()
    left = writers_left(directory)
    for process in job:  # NVRx's own manager process outlives a killed rank
        if process.pid is None:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Ended(codes=codes, seconds=seconds, writers_left=left)


def writers_left(directory: str) -> int:
    """How many writers do not end by themselves."""
    pids = [int(path.read_text()) for path in Path(directory).parent.glob(f"{Path(directory).name}.writer_*")]
    deadline = time.monotonic() + WRITER_SECONDS
    while (left := [pid for pid in pids if process_state(pid) not in ("", "Z")]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return len(left)


def can_mount(directory: Path) -> bool:
    tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], check=False, capture_output=True)
    if tried.returncode == 0:
        subprocess.run(["umount", directory], check=True)
    return tried.returncode == 0


@pytest.fixture(scope="module")
def rows(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Row]:
    directory = tmp_path_factory.mktemp("faults")
    if not can_mount(directory):
        pytest.skip(NO_MOUNT)
    cells = [cell for cell in CELLS if cell in EVERYDAY and cell.not_applicable is None]
    return {row.cell: row for row in run_cells(ranks, cells, directory)}


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell in EVERYDAY], ids=str)
@pytest.mark.timeout(300)
def test_a_fault(rows: dict[Cell, Row], cell: Cell) -> None:
    if cell.not_applicable is not None:
        pytest.skip(cell.not_applicable)
    assert rows[cell].faults == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_fault(ranks: RankPool, tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip(NO_MOUNT)
    began = time.monotonic()
    ran = {row.cell: row for row in run_cells(ranks, [c for c in CELLS if c.not_applicable is None], tmp_path)}
    lines = [(cell, *_judged(cell, ran)) for cell in CELLS]
    _print(lines)
    _document(lines, time.monotonic() - began)
    assert [line for line in lines if line[1] == "FAILED"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_selection_at_four_ranks(ranks: RankPool, tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip(NO_MOUNT)
    with small_file_systems(AT_FOUR_RANKS, tmp_path) as placed:
        found = ranks.run(survive_on_rank, placed, world_size=4, timeout=200)
    rows = [Row(cell=cell, found=each) for cell, each in zip(AT_FOUR_RANKS, zip(*found, strict=True), strict=True)]
    assert {str(row.cell): row.faults for row in rows if row.faults} == {}


def _judged(cell: Cell, ran: dict[Cell, Row]) -> tuple[str, str]:
    if cell.not_applicable is not None:
        return "n/a", cell.not_applicable
    row = ran[cell]
    return ("FAILED", "; ".join(row.faults)) if row.faults else ("ok", row.text)


def _print(lines: Sequence[tuple[Cell, str, str]]) -> None:
    table = Table("who", "fault", "phase", "result", "what happened")
    for cell, result, text in lines:
        table.add_row(cell.actor, cell.fault, cell.phase, result, text)
    Console(width=180).print(table)


def _document(lines: Sequence[tuple[Cell, str, str]], seconds: float) -> None:
    results = [result for _, result, _ in lines]
    text = [
        "# Faults in every phase of a save",
        "",
        f"Written by `make faults`: {results.count('ok')} cells ran and passed, {results.count('FAILED')} failed, "
        f"{results.count('n/a')} do not exist; {seconds:.0f} s.",
        "",
        "Each cell is a save of step 2, at two ranks with real writer processes, after step 1 was saved. The fault "
        "fires once, and leaves a note that it did. Then: nobody hangs; every rank raises the same error, which names "
        "rank, phase and cause, or the job ends with a code that is not zero; no writer is left; the newest complete "
        "checkpoint holds what was saved, bit for bit; the tracker names a complete checkpoint; where the job lives, "
        "it saves again; and a new job follows the prepared file and saves.",
        "",
        "`make faults` also runs a selection at four ranks. Limits: one machine, gloo, small states, and tmpfs in the "
        "place of a parallel file system.",
        "",
        "| who | fault | phase | result | what happened |",
        "|---|---|---|---|---|",
    ]
    text += [f"| {c.actor} | {c.fault} | {c.phase} | {result} | {_short(what)} |" for c, result, what in lines]
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text("\n".join(text) + "\n")


def _short(text: str) -> str:
    """Without the directories and random names of this run."""
    without = re.sub(r"(?<![\w.])/[^\s']*/", "", text)
    return re.sub(r"\.[0-9a-f]{12}\.tmp", ".*.tmp", without).replace("|", "/")
