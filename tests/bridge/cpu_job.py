"""One rank of a Megatron-Bridge job on the CPU: ``recipes/bridge/pretrain.py`` as it is, with a stand-in for TE.

``BRIDGE_JOB`` names what else is different: ``stock`` is Bridge without this package; ``no_writer`` lets no writer
process of rank 1 start; in ``watched`` jobs each write takes long, and ``NOTES_FILE`` keeps what callbacks are told
when a checkpoint is saved.
"""

import json
import os
import runpy
import sys
from functools import partial, wraps
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bridge.slow_write import slowly  # noqa: E402  (needs the path set above)
from bridge.te_stand_in import install_unless_there  # noqa: E402  (needs the path set above)

RECIPE = HERE.parents[1] / "recipes" / "bridge" / "pretrain.py"


def leave_bridge_alone() -> None:
    from megatron_ckpt_ext.integrations import bridge

    vars(bridge)["with_ckpt_ext"] = lambda config: config


def write_slowly() -> None:
    from megatron.bridge.training import checkpointing

    stock = checkpointing.schedule_async_save

    @wraps(stock)
    def schedule_async_save(state: Any, request: Any) -> Any:
        return stock(state, request._replace(async_fn=partial(slowly, request.async_fn)))

    checkpointing.schedule_async_save = schedule_async_save


def start_no_writer_on_rank_1() -> None:
    from megatron_ckpt_ext.integrations import megatron_queue

    def refuse(*_args: Any) -> None:
        raise OSError("no process can be started here")

    if os.environ["RANK"] == "1":
        vars(megatron_queue)["Writer"] = refuse


def note(file: Path, context: Any) -> None:
    """Add what a callback is told, and which steps are published now."""
    published = sorted(path.parent.name for path in Path(context.state.cfg.checkpoint.save).glob("iter_*/.metadata"))
    if os.environ["RANK"] == "0":
        with open(file, "a") as notes:
            notes.write(json.dumps({"told": context.state.train_state.step, "published": published}) + "\n")


def note_saves(file: Path) -> None:
    from megatron.bridge.training import pretrain as module
    from megatron.bridge.training.callbacks import CallbackManager

    callbacks = CallbackManager()
    callbacks.register("on_checkpoint_save", partial(note, file))
    module.pretrain = partial(module.pretrain, callbacks=callbacks)


def main() -> None:
    install_unless_there()
    kind = os.environ.get("BRIDGE_JOB", "")
    if kind == "stock":
        leave_bridge_alone()
    if kind == "no_writer":
        start_no_writer_on_rank_1()
    if kind == "watched":
        write_slowly()
        note_saves(Path(os.environ["NOTES_FILE"]))
    runpy.run_path(str(RECIPE))["main"]()  # not as __main__: that is what the writer process would import


if __name__ == "__main__":
    main()
