"""``make demo-fsdp``: Megatron-FSDP with ``--ckpt-format fsdp_dtensor``, on two CPU ranks of Megatron's training loop.

Job 1 is stock Megatron, and saves nothing: on these ranks its saves and loads of this format never return, with
``--async-save`` or without. Job 2 makes the prepared metadata, job 3 resumes from job 2 and reuses it, job 4 resumes
from job 2 on a machine without NVRx. Then the checks that a user would ask for. Exit code 1 if any of them is false.
"""

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from checks import Check, cost_table, equal_losses, run_demo, same_content  # noqa: E402  (needs the path set above)
from compare import differences_of_checkpoints, load_with_dcp  # noqa: E402
from jobs import FSDP_RECIPE, SAVING, Job, run_job, save_costs  # noqa: E402
from nvrx_stand_ins import WITHOUT_NVRX  # noqa: E402
from rich.table import Table  # noqa: E402
from shard_dump import differences_from_memory  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save  # noqa: E402

from megatron_ckpt_ext import latest_complete_step, verify_checkpoint  # noqa: E402
from megatron_ckpt_ext.events import Phase  # noqa: E402

STEPS, MIDDLE, INTERVAL = 260, 248, 4
"""Jobs 3 and 4 save at 252, 256 and 260: across the step at which the optimizer's counter needs one byte more."""
SAVED = range(MIDDLE + INTERVAL, STEPS + 1, INTERVAL)
COMMON = ("--swiglu", "--train-iters", str(STEPS), "--log-interval", "50")
OBJECT_COLLECTIVES = {"create": [5], "reuse": [0, 0, 0], "fallback": [4, 0, 0]}
"""Of each save: a gather and a scatter of plans, a gather and a broadcast of the layout; in create also what brings the
prepared file to every node."""


def run_jobs(output: Path, say: Callable[[str], None]) -> dict[str, Job]:
    """Run every job, one after the other; later ones start from the checkpoint of job 2."""
    prepared = ("--ckpt-metadata", str(output / "prepared.metadata"))

    def job(name: str, text: str, *arguments: str, into: str, **options: Any) -> Job:
        say(text)
        events = () if options.get("stock") else ("--ckpt-events", str(output / name / "events"))
        place = ("--save", str(output / into)) if into else ()
        words = (*COMMON, *place, *events, *arguments)
        without = () if into else SAVING
        return run_job(name, words, output=output, recipe=FSDP_RECIPE, without=without, **options)

    jobs = {
        "stock": job("stock", f"job 1: stock, {STEPS} iterations without a stop or a save", into="", stock=True),
        "create": job(
            *("create", f"job 2: creates the prepared metadata, stops at {MIDDLE}", *prepared),
            *("--ckpt-metadata-create", "--save-interval", str(MIDDLE), "--exit-interval", str(MIDDLE)),
            into="async",
        ),
    }
    shutil.copytree(output / "async", output / "start")
    resuming = ("--save-interval", str(INTERVAL), "--load", str(output / "start"))
    jobs["reuse"] = job(
        "reuse", f"job 3: resumes at {MIDDLE}, reuses it, crosses step 256", *prepared, *resuming, into="async"
    )
    jobs["fallback"] = job(
        *("fallback", f"job 4: resumes at {MIDDLE} without NVRx", *resuming),
        into="sync",
        sitecustomize=WITHOUT_NVRX,
    )
    forget_momentum(output / "start", output / "forgetful")
    jobs["control"] = job(
        *("control", "control: resumes from a checkpoint without momentum", "--load", str(output / "forgetful")),
        into="",
    )
    return jobs


def forget_momentum(start: Path, target: Path) -> None:
    """Copy a checkpoint with plain ``torch.distributed.checkpoint``, the optimizer's first moments set to 0."""
    shutil.copytree(start, target)
    checkpoint = target / f"iter_{MIDDLE:07d}"
    state = load_with_dcp(checkpoint)
    for key in state:
        if key.endswith(".exp_avg"):
            state[key].zero_()
    shutil.rmtree(checkpoint)
    with warnings.catch_warnings(action="ignore"):  # torch says that one process saves
        save(state, storage_writer=FileSystemWriter(checkpoint), no_dist=True)


def checks(jobs: Mapping[str, Job], output: Path) -> Iterator[Check]:
    """Look at everything that the demo claims."""
    yield from _training(jobs)
    yield from _contents(jobs, output)
    yield from _costs(jobs)
    yield from _published(jobs, output)
    yield from _fallback_files(output)


def _training(jobs: Mapping[str, Job]) -> Iterator[Check]:
    resumed = range(MIDDLE + 1, STEPS + 1)
    for number, name in ((3, "reuse"), (4, "fallback")):
        claim = f"job {number}'s losses equal the uninterrupted job's, exactly"
        yield equal_losses(claim, jobs[name], jobs["stock"], resumed)
    control, reference = jobs["control"].losses, jobs["stock"].losses
    same = [step for step in resumed if control.get(step) == reference[step]]
    yield Check(
        claim="a resume without momentum is told apart",
        holds=len(same) < len(resumed) and control.keys() >= set(resumed),
        found=f"{len(resumed) - len(same)} of {len(resumed)} losses differ",
    )


def _contents(jobs: Mapping[str, Job], output: Path) -> Iterator[Check]:
    for name, folder in (("reuse", "async"), ("fallback", "sync")):
        for step in SAVED:
            checkpoint = output / folder / f"iter_{step:07d}"
            claim = f"plain torch.distributed.checkpoint reads step {step} of {name} back bit for bit"
            yield same_content(claim, *differences_from_memory(checkpoint, jobs[name].dump, step))
    for step in SAVED:
        both = (output / folder / f"iter_{step:07d}" for folder in ("async", "sync"))
        yield same_content(f"step {step} has one content in reuse and fallback", *differences_of_checkpoints(*both))


def _costs(jobs: Mapping[str, Job]) -> Iterator[Check]:
    for name, expected in OBJECT_COLLECTIVES.items():
        found = [cost.collectives.objects for cost in save_costs(jobs[name])]
        yield Check(
            claim=f"object collectives of each save of {name} are {expected}",
            holds=found == expected,
            found=str(found),
        )


def _published(jobs: Mapping[str, Job], output: Path) -> Iterator[Check]:
    for folder in ("async", "sync"):
        tracker = (output / folder / "latest_checkpointed_iteration.txt").read_text()
        newest = latest_complete_step(str(output / folder)).step
        yield Check(
            claim=f"tracker and newest complete checkpoint in {folder}/ are {STEPS}",
            holds=tracker == str(newest) == str(STEPS),
            found=f"{tracker} and {newest}",
        )
        problems = [verify_checkpoint(str(output / folder / f"iter_{step:07d}")).problems for step in SAVED]
        yield Check(
            claim=f"every step in {folder}/ is complete", holds=not any(problems), found=f"{problems or 'no problem'}"
        )
    warnings = jobs["fallback"].log.count("Checkpoints are saved synchronously, though")
    reasons = {event.reason for event in jobs["fallback"].events if event.phase is Phase.FALLBACK}
    yield Check(
        claim="the fallback is said once, and the events have its reason",
        holds=warnings == 1 and reasons == {"nvidia-resiliency-ext is not installed"},
        found=f"{warnings} warning, {reasons}",
    )


def _fallback_files(output: Path) -> Iterator[Check]:
    """One writer a rank: its file and no other one, and every byte of it is one item's."""
    for step in SAVED:
        checkpoint = output / "sync" / f"iter_{step:07d}"
        places = FileSystemReader(checkpoint).read_metadata().storage_data.values()
        sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir() if path.name != ".metadata"}
        written = {name: sum(at.length for at in places if at.relative_path == name) for name in sizes}
        yield Check(
            claim=f"step {step} of fallback is one file a rank, and each byte of it is one item's",
            holds=sizes.keys() == {"__0_0.distcp", "__1_0.distcp"} and sizes == written,
            found=f"bytes {sizes}, of items {written}",
        )


def run_all(output: Path, say: Callable[[str], None]) -> tuple[Table, Iterator[Check]]:
    """Run every job; return what to print."""
    jobs = run_jobs(output, say)
    return cost_table(jobs[name] for name in ("create", "reuse", "fallback")), checks(jobs, output)


if __name__ == "__main__":
    sys.exit(run_demo(__doc__, run_all))
