"""A Megatron training job in which the extension is put in and taken out between blocks of iterations.

Run by ``flags_unset.py`` through ``megatron-ckpt run`` in place of the training script, which the environment names,
with how many rounds to do and the folder for ``blocks.RANK.json``. A block begins two iterations behind a save and ends
there after its own saves, when the last of them is published. What happens between two blocks is not timed.
"""

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from blocks import INSTALLED, Block, blocks_of
from megatron.training import get_args, training

from megatron_ckpt_ext.integrations.megatron_lm import Installation, install

__all__: list[str] = []

SETTLED = 2
"""Iterations between a save and the end of its block: polls find the save in flight, and its end."""


class Alternation:
    """Goes through the blocks. Owns the installation of the block that runs."""

    def __init__(self, kinds: Sequence[str], iterations: int) -> None:
        """Begin before the first block; ``kinds`` has a name for each, ``iterations`` is the length of one."""
        self.blocks: list[Block] = []
        self._kinds = list(kinds)
        self._iterations = iterations
        self._installation: Installation | None = None
        self._kind = ""
        self._save_calls: list[float] = []
        self._start = 0.0, 0.0

    def before_iteration(self, number: int) -> None:
        """Turn to the next block where one is due. Called on all ranks."""
        if (number - SETTLED) % self._iterations == 0:
            self._end()
            self._begin()

    def save_call(self, seconds: float) -> None:
        """Note how long Megatron's save took the training thread."""
        self._save_calls.append(seconds)

    def _begin(self) -> None:
        if not self._kinds:
            return
        self._kind = self._kinds.pop(0)
        if self._kind == INSTALLED:
            self._installation = install()
            # As a job has it that was installed from the start and was given none of the flags.
            self._installation.begin(get_args())
        self._save_calls = []
        dist.barrier()
        self._start = time.perf_counter(), time.thread_time()

    def _end(self) -> None:
        training.maybe_finalize_async_save(blocking=True)
        wall, cpu = (now - then for now, then in zip(_clocks(), self._start, strict=True))
        if self._kind:
            save_call = statistics.fmean(self._save_calls)
            self.blocks.append(Block(kind=self._kind, wall=wall, cpu=cpu, save_call=save_call))
        self._kind = ""
        if self._installation is not None:
            self._installation.close()
            self._installation = None
        dist.barrier()
        if dist.get_rank() == 0:
            _remove_all_but_newest(Path(get_args().save))


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def _remove_all_but_newest(save: Path) -> None:
    for checkpoint in sorted(save.glob("iter_*"))[:-1]:
        shutil.rmtree(checkpoint)


def follow(alternation: Alternation) -> None:
    """Let ``alternation`` see every iteration and every save of Megatron's training loop."""
    step, save = training.train_step, training.save_checkpoint_and_time

    @wraps(step)
    def train_step(*args: Any, **options: Any) -> Any:
        alternation.before_iteration(get_args().curr_iteration)
        return step(*args, **options)

    @wraps(save)
    def save_checkpoint_and_time(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = save(*args, **options)
        alternation.save_call(time.perf_counter() - start)
        return result

    training.train_step = train_step
    training.save_checkpoint_and_time = save_checkpoint_and_time


def main() -> None:
    """Run the script that the environment names, with this process's arguments."""
    install().close()
    script, folder = Path(os.environ["ALTERNATED_SCRIPT"]), Path(os.environ["ALTERNATED_FOLDER"])
    kinds = blocks_of(int(os.environ["ALTERNATED_ROUNDS"]))
    alternation = Alternation(kinds, int(os.environ["ALTERNATED_ITERATIONS"]))
    follow(alternation)
    sys.argv[0] = str(script)
    sys.path.insert(0, str(script.resolve().parent))
    exec(compile(script.read_bytes(), str(script), "exec"), {"__name__": "__main__", "__file__": str(script)})
    if len(alternation.blocks) != len(kinds):
        raise RuntimeError(f"{len(alternation.blocks)} of {len(kinds)} blocks were done")
    written = [block.to_json() for block in alternation.blocks]
    (folder / f"blocks.{os.environ['RANK']}.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main()
