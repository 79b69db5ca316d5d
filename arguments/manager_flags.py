"""The flags of ``CheckpointManager``, dotted under any prefix: ``--ckpt.async-save``, ``--trainer.ckpt.async-save``.

Each is a field of ``ManagerConfig``. A flag that is not given leaves no trace in the namespace.
"""

import argparse
from typing import Any

__all__ = ["MANAGER_FLAGS", "add_manager_args"]

_SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction}

MANAGER_FLAGS: dict[str, dict[str, Any]] = {
    "async_save": _SWITCH | {"help": "Write checkpoints in the background while training goes on (off by default)."},
    "keep_last": {"type": int, "metavar": "N", "help": "Keep the newest N complete steps (default: all)."},
    "keep_interval": {"type": int, "metavar": "N", "help": "Keep the steps that N divides."},
    "ckpt_metadata": {
        "metavar": "FILE",
        "help": "Prepared metadata: saves follow the layout in FILE and need no object collectives.",
    },
    "ckpt_metadata_create": _SWITCH | {"help": "Make FILE in the first save, unless one that fits is there."},
    "ckpt_metadata_on_drift": {
        "choices": ["rebuild", "fail"],
        "help": "What a save does whose layout is another one: rebuild it with all ranks (default), or fail.",
    },
    "writer": {
        "choices": ["thread", "process"],
        "help": "Who writes in the background: a thread, from staged host memory (default), or NVRx's process.",
    },
    "subdirectory": {"metavar": "DIR", "help": "Name in step_N of the checkpoint (default: step_N itself)."},
    "staging_limit": {
        "type": int,
        "metavar": "BYTES",
        "help": "Most host memory that a rank stages; a larger state is refused (default: what is free).",
    },
    "save_timeout": {
        "type": float,
        "metavar": "SECONDS",
        "help": "Give up a save that is waited for after so long (default 1800).",
    },
    "files_per_rank": {"type": int, "metavar": "N", "help": "Files that each rank writes (default 1)."},
    "events": {"metavar": "FILE", "help": "Append one JSON line for each phase of a save to FILE.<rank>."},
    "progress": _SWITCH | {"help": "Show long writes and loads on a terminal (on by default)."},
}
"""Field of ``ManagerConfig`` -> keywords of ``argparse.ArgumentParser.add_argument``."""


def add_manager_args(parser: argparse.ArgumentParser, prefix: str = "ckpt") -> argparse.ArgumentParser:
    """Register ``--PREFIX.NAME`` for each setting; ``ManagerConfig.from_args`` reads them. No collectives.

    Args:
        parser: also returned.
        prefix: one name, or several with dots.
    """
    group = parser.add_argument_group(f"checkpoints ({prefix})")
    for name, settings in MANAGER_FLAGS.items():
        option = f"--{prefix}.{name.replace('_', '-')}"
        group.add_argument(option, dest=f"{prefix}.{name}", default=argparse.SUPPRESS, **settings)
    return parser
