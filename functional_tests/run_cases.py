"""``make functional``: the cases of ``test_cases`` as real jobs on a two-node Slurm on this machine.

One line a case says whether everything held; below it stands what did not. Exit code 1 if anything did not, 2 for bad
input.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "slurm"), str(ROOT.parent)]

from case_jobs import Place, References, run_life  # noqa: E402
from cases import Case, cases_in_scope  # noqa: E402  (needs the path set above)
from checks import Check  # noqa: E402
from cluster import NODES, Cluster, SlurmError  # noqa: E402
from evidence import Evidence  # noqa: E402
from jobs import JobFailedError, Launch  # noqa: E402
from packages import PackagesError  # noqa: E402
from rich.console import Console  # noqa: E402
from trainers import trainer_of  # noqa: E402


def run_case(case: Case, place: Place, references: References) -> list[Check]:
    """Run every life of a case and look at each when it has ended; stops behind the first that did not end well."""
    trainer = trainer_of(case)
    place.output.mkdir(parents=True)
    found: list[Check] = []
    for life in case.lives:
        try:
            reference = references.of(case, life, trainer, place)
            job = run_life(case, life, trainer, place)
        except JobFailedError as error:
            return [*found, Check(claim=f"{life.name}: the job ends as it should", holds=False, found=str(error))]
        evidence = Evidence(case=case, life=life, job=job, reference=reference, trainer=trainer, place=place)
        try:
            found += [replace(check, claim=f"{life.name}: {check.claim}") for check in evidence.checks()]
        except (OSError, ValueError, LookupError) as error:  # what a job should have left is not there
            found.append(Check(claim=f"{life.name}: there is something to look at", holds=False, found=repr(error)))
    return found


def tell(console: Console, case: Case, checks: Sequence[Check], seconds: float, *, verbose: bool = False) -> bool:
    """Print the verdict on a case, and what did not hold, or everything; returns whether all did."""
    failed = [check for check in checks if not check.holds]
    mark = "[bold red]FAIL[/bold red]" if failed else "[green]pass[/green]"
    held = f"{len(checks) - len(failed)} of {len(checks)} checks"
    console.print(
        f"{mark}  {case.name}: {held}, {len(case.lives)} jobs, {seconds:.0f} s", highlight=False, soft_wrap=True
    )
    for check in checks if verbose else failed:
        console.print(f"      {check.claim}: {check.found}", highlight=False, markup=False, soft_wrap=True)
    return not failed


def place_of(case: Case, output: Path, cluster: Cluster | None) -> Place:
    """Return where a case runs: on both nodes of a cluster, or here as on one node."""
    folder, temporary = output / case.name, Path(tempfile.mkdtemp(dir=output, prefix="tmp-"))
    if cluster is None:
        return Place(output=folder, local=folder / "local", temporary=temporary)
    behind = tuple(cluster.behind_local(node) / case.name for node in NODES)
    for each in behind:
        each.mkdir()
    return Place(
        output=folder,
        local=cluster.local / case.name,
        temporary=temporary,
        behind_local=behind,
        launch=on_cluster(cluster),
    )


def on_cluster(cluster: Cluster) -> Launch:
    """Return what submits a job to a cluster, its ranks shared out among the nodes."""

    def launch(
        words: Sequence[str], ranks: int, environment: Mapping[str, str], log: Path, timeout: float
    ) -> int | str:
        variables = {**environment, "PYTHON": sys.executable, "RANKS_PER_NODE": str(ranks // len(NODES))}
        try:
            return cluster.submit(words, name=log.parent.name, environment=variables, log=log, timeout=timeout)
        except SlurmError as error:
            return f"none: {error}"

    return launch


def main() -> int:
    """Run the cases that were asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="only these")
    parser.add_argument("--scope", help="only those that a suite lists for this scope")
    parser.add_argument("--here", action="store_true", help="without Slurm: all ranks on this machine as one node")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep checkpoints, logs and events here")
    parser.add_argument("--verbose", action="store_true", help="tell what was found where all was well, too")
    options = parser.parse_args()
    cases = [case for case in cases_in_scope(options.scope) if not options.cases or case.name in options.cases]
    unknown = set(options.cases) - {case.name for case in cases}
    if unknown or not cases:
        known = ", ".join(case.name for case in cases_in_scope())
        print(f"There is no case {' '.join(sorted(unknown))} in scope {options.scope}: {known}.", file=sys.stderr)
        return 2
    if options.keep and options.keep.exists():
        parser.error(f"{options.keep} is there already: name a folder that is not")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the cluster is closed
    try:
        return run(cases, options)
    except (SlurmError, PackagesError) as error:
        print(f"make functional: {error}", file=sys.stderr)
        return 2


def run(cases: Sequence[Case], options: argparse.Namespace) -> int:
    """Run cases one after the other; returns the exit code."""
    console = Console()
    output = options.keep or Path(tempfile.mkdtemp(prefix="megatron-ckpt-functional-"))
    passed = True
    with ExitStack() as stack:
        if options.keep is None:
            stack.callback(shutil.rmtree, output, ignore_errors=True)
        (output / "references").mkdir(parents=True)
        references = References(output / "references")
        cluster = None if options.here else stack.enter_context(Cluster())
        for case in cases:
            if case.node_local and cluster is None:
                console.print(f"[yellow]skip[/yellow]  {case.name}: it needs two nodes", highlight=False)
                continue
            began = time.monotonic()
            checks = run_case(case, place_of(case, output, cluster), references)
            passed &= tell(console, case, checks, time.monotonic() - began, verbose=options.verbose)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
