"""Runs a Megatron training script in a rank of a test job: keeps losses, and does what ``FSDP_JOB`` names first.

At the end it writes what there is of NVRx in the process.

``stock`` puts every replaced name back, and ends the rank with all stacks in the log where its save does not return.
``no_writer`` lets no writer process of rank 1 start. ``late_clean_up`` holds rank 0 up before it removes old
checkpoints that are not persistent: the other rank is ahead.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any

from megatron.training import checkpointing, training
from state_dump import keep_every_loss

import megatron_ckpt_ext

HANGS_AFTER_SECONDS = 6


PR_SET_PDEATHSIG = 1


def end_forks_with_this_rank() -> None:
    """Stock Megatron forks a process for the results of writers, which would outlive a rank that ends at once."""
    libc = ctypes.CDLL(None)
    os.register_at_fork(after_in_child=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))


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


def clean_up_late() -> None:
    stock = checkpointing.cleanup_old_non_persistent_checkpoint

    @wraps(stock)
    def cleanup_old_non_persistent_checkpoint(*args: Any, **options: Any) -> None:
        if os.environ["RANK"] == "0":
            time.sleep(1)
        stock(*args, **options)

    checkpointing.cleanup_old_non_persistent_checkpoint = cleanup_old_non_persistent_checkpoint


def keep_what_there_is_of_nvrx(folder: Path) -> None:
    loaded = sorted(name for name, module in sys.modules.items() if name.startswith("nvidia_res") and module)
    error = ""
    try:
        importlib.import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
    except ImportError as failure:
        error = f"{type(failure).__name__}: {failure}"
    (folder / f"nvrx.{os.environ['RANK']}").write_text(json.dumps({"loaded": loaded, "error": error}))


def main() -> None:
    kind = os.environ.get("FSDP_JOB", "")
    if kind == "stock":
        megatron_ckpt_ext.install().close()
        end_forks_with_this_rank()
        watch_saves()
    elif kind == "no_writer" and os.environ["RANK"] == "1":
        start_no_writer()
    elif kind == "late_clean_up":
        clean_up_late()
    folder, script = Path(os.environ["STATE_DUMP_FOLDER"]), os.environ["STATE_DUMP_SCRIPT"]
    folder.mkdir(exist_ok=True)
    keep_every_loss(folder)
    sys.argv[0] = script
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), {"__name__": "__main__", "__file__": script})
    finally:
        keep_what_there_is_of_nvrx(folder)


if __name__ == "__main__":
    main()
