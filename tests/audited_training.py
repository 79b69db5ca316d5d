"""Runs a Megatron training script and notes, in ``AUDIT_FILE``, one JSON line each: what the process does meanwhile.

Noted: every fork, with the file that asked for it; the processes that were spawned, and what is published, before each
step. The writer of the save at ``BLOCKED_STEP`` stands still until ``RELEASED_STEP``.
"""

import os
import sys
from functools import partial, wraps
from pathlib import Path
from typing import Any

from megatron.training import async_utils, checkpointing, get_args, training
from watching import Notes, children, noting_forks

BLOCKED_STEP = 2
RELEASED_STEP = 5


def spawned() -> list[int]:
    """Children that are interpreters of their own, as the writer is."""
    return sorted(pid for pid in children() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())


def look(notes: Notes) -> None:
    """Note what is visible now."""
    directory = Path(get_args().save)
    tracker = directory / "latest_checkpointed_iteration.txt"
    notes.add(
        "seen",
        {
            "step": get_args().curr_iteration + 1,
            "spawned": spawned(),
            "tracker": tracker.read_text() if tracker.exists() else "",
            "published": sorted(path.parent.name for path in directory.glob("*/.metadata")),
        },
    )


def audit(notes: Notes, gate: Path) -> None:
    """Put the notes around the training loop."""
    step_of_megatron, schedule = training.train_step, checkpointing.schedule_async_save

    @wraps(step_of_megatron)
    def train_step(*args: Any, **options: Any) -> Any:
        if get_args().curr_iteration + 1 == RELEASED_STEP:
            gate.touch()
            async_utils._async_calls_queue.maybe_finalize_async_calls(no_dist=True)
        look(notes)
        return step_of_megatron(*args, **options)

    @wraps(schedule)
    def schedule_async_save(request: Any) -> Any:
        held = get_args().curr_iteration + 1 == BLOCKED_STEP
        function = partial(noting_forks, notes.add, gate if held else None, request.async_fn)
        return schedule(request._replace(async_fn=function))

    training.train_step = train_step
    checkpointing.schedule_async_save = schedule_async_save


def main() -> None:
    """Run the script that the environment names, with this process's arguments."""
    notes = Notes(os.environ["AUDIT_FILE"])
    sys.addaudithook(notes.hear)
    audit(notes, Path(os.environ["AUDIT_FILE"] + ".gate"))
    script = os.environ["AUDIT_SCRIPT"]
    sys.argv[0] = script
    sys.path.insert(0, str(Path(script).parent))
    exec(compile(Path(script).read_bytes(), script, "exec"), {"__name__": "__main__", "__file__": script})


if __name__ == "__main__":
    main()
