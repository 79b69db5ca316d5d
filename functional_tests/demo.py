"""``make demo``: what the extension does, on two CPU ranks of Megatron's own training loop.

Job 1 saves as Megatron does, job 2 makes the prepared metadata, job 3 resumes from job 2 and reuses it. Then the checks
that a user would ask for. Exit code 1 if any of them is false.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from checks import Check, cost_table, equal_losses, run_demo, same_content  # noqa: E402  (needs the path set above)
from compare import differences_from_dcp, differences_of_dumps  # noqa: E402
from jobs import Job, run_job, save_costs  # noqa: E402
from rich.table import Table  # noqa: E402

from megatron_ckpt_ext import verify_checkpoint  # noqa: E402

STEPS, MIDDLE, INTERVAL = 260, 248, 4
"""Job 3 saves at 252, 256 and 260: across the step at which the optimizer's counter needs one byte more."""
COMMON = ("--train-iters", str(STEPS), "--ckpt-assume-constant-structure", "--log-interval", "50")


def run_jobs(output: Path, say: Callable[[str], None]) -> dict[str, Job]:
    """Run every job, one after the other; later ones start from the checkpoints of earlier ones."""
    prepared = str(output / "prepared.metadata")
    ours, stock, scratch = (str(output / name) for name in ("ours", "stock", "scratch"))

    def job(name: str, text: str, *arguments: str, load: str, save: str, plain: bool = False) -> Job:
        say(text)
        events = () if plain else ("--ckpt-events", str(output / name / "events"))
        return run_job(name, (*COMMON, "--load", load, "--save", save, *events, *arguments), output=output, stock=plain)

    every = ("--save-interval", str(INTERVAL))
    seldom = ("--save-interval", str(STEPS // 4)), ("--save-interval", str(MIDDLE // 4))
    jobs = {
        "stock": job("stock", f"job 1: stock, {STEPS} iterations without a stop", *seldom[0], load=stock, save=stock),
        "create": job(
            *("create", f"job 2: creates the prepared metadata, stops at {MIDDLE}", *seldom[1]),
            *("--exit-interval", str(MIDDLE)),
            *("--ckpt-metadata", prepared, "--ckpt-metadata-create"),
            load=ours,
            save=ours,
        ),
    }
    shutil.copytree(ours, scratch)
    jobs["reuse"] = job(
        *("reuse", f"job 3: resumes at {MIDDLE}, reuses it, crosses step 256", *every),
        *("--ckpt-metadata", prepared),
        load=ours,
        save=ours,
    )
    jobs["control"] = job(
        *("control", "control: resumes without optimizer state", "--no-load-optim", "--no-save-optim", *every),
        load=scratch,
        save=str(output / "unused"),
        plain=True,
    )
    jobs["reader"] = job(
        *("reader", "reader: stock Megatron loads the last checkpoint of job 3", "--save-interval", "1000"),
        load=ours,
        save=str(output / "read back"),
        plain=True,
    )
    return jobs


def checks(jobs: Mapping[str, Job], output: Path) -> Iterator[Check]:
    """Look at everything that the demo claims."""
    reference, control = jobs["stock"].losses, jobs["control"].losses
    resumed = range(MIDDLE + 1, STEPS + 1)
    yield equal_losses("job 3's losses equal the uninterrupted job's, exactly", jobs["reuse"], jobs["stock"], resumed)
    same = [step for step in resumed if control.get(step) == reference[step]]
    yield Check(
        claim="a resume without optimizer state is told apart",
        holds=len(same) < len(resumed) and control.keys() >= set(resumed),
        found=f"{len(resumed) - len(same)} of {len(resumed)} losses differ",
    )
    compared, different = differences_of_dumps(jobs["reuse"].dump, jobs["reader"].dump, STEPS)
    yield same_content("stock Megatron reads job 3's last checkpoint back bit for bit", compared, different)
    for step in range(MIDDLE + INTERVAL, STEPS + 1, INTERVAL):
        compared, different = differences_from_dcp(output / "ours" / f"iter_{step:07d}", jobs["reuse"].dump, step)
        yield same_content(
            f"plain torch.distributed.checkpoint reads step {step} back bit for bit", compared, different
        )
    for step in range(MIDDLE + INTERVAL, STEPS + 1, INTERVAL):
        report = verify_checkpoint(str(output / "ours" / f"iter_{step:07d}"))
        yield Check(claim=f"step {step} is complete", holds=report.complete, found=f"{report.problems or 'no problem'}")
    costs = save_costs(jobs["reuse"])
    objects = sum(cost.collectives.objects for cost in costs)
    yield Check(
        claim="job 3's saves have no object collectives, its first one included",
        holds=objects == 0 and len(costs) == (STEPS - MIDDLE) // INTERVAL,
        found=f"{objects} in {len(costs)} saves",
    )


def run_all(output: Path, say: Callable[[str], None]) -> tuple[Table, Iterator[Check]]:
    """Run every job; return what to print."""
    jobs = run_jobs(output, say)
    return cost_table(jobs[name] for name in ("stock", "create", "reuse")), checks(jobs, output)


if __name__ == "__main__":
    sys.exit(run_demo(__doc__, run_all))
