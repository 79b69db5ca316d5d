"""Runs a Megatron training script in a rank of a test job: keeps losses, and does what ``FSDP_JOB`` names first.

``stock`` puts every replaced name back, and ends the rank with all stacks in the log where its save does not return.
``no_writer`` lets no writer process of rank 1 start.
"""

import faulthandler
import os
import sys
from functools import wraps
from pathlib import Path
from typing import Any

from megatron.training import training
from state_dump import keep_every_loss

import megatron_ckpt_ext

HANGS_AFTER_SECONDS = 6


def watch_saves() -> None:
    stock = training.save_checkpoint

    @wraps(stock)
    def save_checkpoint(*args: Any, **options: Any) -> Any:
        faulthandler.dump_traceback_later(HANGS_AFTER_SECONDS, exit=True)
        return stock(*args, **options)

    training.save_checkpoint = save_checkpoint


def start_no_writer() -> None:
    from megatron_ckpt_ext.integrations import megatron_queue

    def refuse(*_args: Any) -> None:
        raise OSError("no process can be started here")

    vars(megatron_queue)["Writer"] = refuse


def main() -> None:
    kind = os.environ.get("FSDP_JOB", "")
    if kind == "stock":
        megatron_ckpt_ext.install().close()
        watch_saves()
    elif kind == "no_writer" and os.environ["RANK"] == "1":
        start_no_writer()
    folder, script = Path(os.environ["STATE_DUMP_FOLDER"]), os.environ["STATE_DUMP_SCRIPT"]
    folder.mkdir(exist_ok=True)
    keep_every_loss(folder)
    sys.argv[0] = script
    exec(compile(Path(script).read_bytes(), script, "exec"), {"__name__": "__main__", "__file__": script})


if __name__ == "__main__":
    main()
