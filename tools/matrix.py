"""``make matrix``: the core tests and one job from end to end against every supported pair of megatron-core and NVRx.

Each version is installed once, without its dependencies, into a folder of its own; the folders of a pair stand first on
the path, so that all pairs share one torch. Prints a table; exit code 1 if a pair fails, 2 for bad input.
"""

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
MEGATRON = ("0.17.1", "0.18.2", "0.19.2")
NVRX = ("0.6.0", "0.7.0")
CORE_TESTS = (
    *("compat", "compat_training", "megatron_main", "create_reuse", "rebuild", "failed_saves", "guard_on_ranks"),
    *("queue", "save_collectives", "common_state", "node_local", "completeness", "fingerprint", "flags", "tracker"),
    *("non_persistent", "emulation", "fsdp_dtensor", "fsdp_dtensor_drift", "fsdp_dtensor_fallback", "manager"),
)
"""Files of ``tests``, by their names without ``test_`` and ``.py``."""
CASES = ("torch_dist_step_256", "fsdp_dtensor_async")
"""Functional cases that are run on this machine."""
OFF = {"0.17.1": "no shared memory for the writer", "0.18.2": "", "0.19.2": ""}
"""What a megatron-core lacks."""
OFF_NVRX = {"0.6.0": "nothing cached for the GPU", "0.7.0": ""}
VERSIONS_PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- made by make matrix -->\n", "<!-- end -->"
INSTALLED = "from importlib.metadata import version as v; print(v('megatron-core'), v('nvidia-resiliency-ext'))"
INSTALL_DEADLINE, TEST_DEADLINE = 600.0, 1500.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one pair did."""

    megatron: str
    nvrx: str
    tests: str
    """Closing line of pytest."""
    cases: str
    """Verdicts on the functional cases."""
    passed: bool

    @property
    def off(self) -> str:
        """What is not there with this pair."""
        return "; ".join(filter(None, (OFF.get(self.megatron, ""), OFF_NVRX.get(self.nvrx, "")))) or "nothing"


class InstallError(Exception):
    """A version that cannot be installed; one sentence."""


def install(name: str, version: str, overlays: Path) -> Path:
    """Install one version into a folder of its own, unless it is there.

    Raises:
        InstallError: pip could not.
    """
    folder = overlays / f"{name}-{version}"
    if (folder / ".complete").exists():
        return folder
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--upgrade",
    ]
    # The NVRx wheels are tagged for glibc 2.39; their checkpointing part is pure Python and runs with an older one.
    tags = [f"manylinux_2_{glibc}_{platform.machine()}" for glibc in (39, 28, 17)]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [word for each in (*tags, "any") for word in ("--platform", each)]
    done = _run([*command, "--target", str(folder), f"{name}=={version}"], os.environ, INSTALL_DEADLINE)
    if done.returncode != 0:
        raise InstallError(f"pip cannot install {name} {version}: {_last_line(done.stdout)}")
    (folder / ".complete").touch()
    return folder


def try_pair(megatron: str, nvrx: str, overlays: Path, only: str | None) -> Result:
    """Run tests and cases with one pair."""
    folders = [install("megatron-core", megatron, overlays), install("nvidia-resiliency-ext", nvrx, overlays)]
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    environment = {**os.environ, "PYTHONPATH": path}
    found = _run([sys.executable, "-c", INSTALLED], environment, INSTALL_DEADLINE).stdout.split()
    if found != [megatron, nvrx]:
        raise InstallError(f"{megatron} and {nvrx} were installed, but Python finds {' and '.join(found)}")
    tests = cases = "not run"
    passed = True
    if only in (None, "tests"):
        files = [f"tests/test_{name}.py" for name in CORE_TESTS]
        done = _run([sys.executable, "-m", "pytest", "-q", "-m", "not slow", *files], environment, TEST_DEADLINE)
        _log(overlays, f"{megatron}-{nvrx}.tests", done.stdout)
        tests, passed = _closing(done.stdout), done.returncode == 0
    if only in (None, "job"):
        script = str(ROOT / "functional_tests" / "run_cases.py")
        done = _run([sys.executable, script, "--here", *CASES], environment, TEST_DEADLINE)
        _log(overlays, f"{megatron}-{nvrx}.cases", done.stdout)
        cases, passed = _verdicts(done.stdout), passed and done.returncode == 0
    return Result(megatron=megatron, nvrx=nvrx, tests=tests, cases=cases, passed=passed)


def _log(overlays: Path, name: str, text: str) -> None:
    (overlays / f"{name}.log").write_text(text)


def _run(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> "subprocess.CompletedProcess[str]":
    """Run to the end, or kill it and all that it has started after some seconds and say so."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return subprocess.CompletedProcess(command, 124, f"no end within {seconds:g} s")
    return subprocess.CompletedProcess(command, process.returncode, printed)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1]


def _closing(text: str) -> str:
    """What pytest counted, without the time."""
    return re.sub(r" in [0-9.]+s.*", "", _last_line(text).strip("= "))


def _verdicts(text: str) -> str:
    found = re.findall(r"^(pass|FAIL)  (\w+)", text, re.MULTILINE)
    return f"{sum(verdict == 'pass' for verdict, _ in found)} of {len(CASES)}" if found else _last_line(text)


def table_of(results: Sequence[Result]) -> Table:
    """Build the table for a terminal."""
    table = Table(title="Core tests and jobs of Megatron's loop by version")
    for column in ("megatron-core", "NVRx", "core tests", "jobs", "off", ""):
        table.add_column(column)
    for each in results:
        mark = "[green]yes[/green]" if each.passed else "[bold red]NO[/bold red]"
        table.add_row(each.megatron, each.nvrx, each.tests, each.cases, each.off, mark)
    return table


def markdown_of(results: Sequence[Result]) -> str:
    """Build the table for the documentation."""
    lines = ["| megatron-core | NVRx | core tests | jobs | off |", "|---|---|---|---|---|"]
    lines += [f"| {each.megatron} | {each.nvrx} | {each.tests} | {each.cases} | {each.off} |" for each in results]
    return "\n".join(lines) + "\n"


def write(results: Sequence[Result], page: Path) -> None:
    """Put the table into a page, between its marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}{markdown_of(results)}{END}{rest.partition(END)[2]}")


def pairs(only: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    """Every supported pair, or the one that was asked for."""
    if only:
        yield only[0], only[1]
        return
    yield from product(MEGATRON, NVRX)


def main() -> int:
    """Run the matrix; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", nargs=2, metavar=("MEGATRON", "NVRX"), help="only this one, supported or not")
    parser.add_argument("--only", choices=("tests", "job"), help="not both")
    parser.add_argument("--overlays", type=Path, default=ROOT / "build" / "matrix", help="where versions are kept")
    parser.add_argument("--write", action="store_true", help=f"put the table into {VERSIONS_PAGE.name}")
    options = parser.parse_args()
    options.overlays.mkdir(parents=True, exist_ok=True)
    console, results = Console(), []
    for megatron, nvrx in pairs(options.pair):
        began = time.monotonic()
        try:
            result = try_pair(megatron, nvrx, options.overlays, options.only)
        except InstallError as error:
            print(f"make matrix: {error}", file=sys.stderr)
            return 2
        results.append(result)
        seconds = time.monotonic() - began
        console.print(f"{megatron} with {nvrx}: {result.tests}; jobs {result.cases}; {seconds:.0f} s", highlight=False)
    console.print(table_of(results))
    if options.write:
        write(results, VERSIONS_PAGE)
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
