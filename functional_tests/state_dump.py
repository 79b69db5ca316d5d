"""Runs a Megatron training script and keeps what it saves: the state dict of every save, as the job holds it.

The script and the folder come in ``STATE_DUMP_SCRIPT`` and ``STATE_DUMP_FOLDER``. Each rank writes ``STEP.RANK.pt``
there before the save goes on, so a checkpoint can be compared with the job's own memory; ``shard_dump`` describes what
``fsdp_dtensor`` saves. With ``STATE_DUMP_STOCK`` every name that the extension replaced is put back first. Losses go to
``losses.RANK``, one JSON line an iteration: Megatron's own log prints the mean of a job's first two iterations as the
loss of the second.
"""

import json
import os
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.training import checkpointing, get_args, training
from shard_dump import described_shards

import megatron_ckpt_ext


def described(state: Any, path: str = "") -> dict[str, dict[str, Any]]:
    """Flatten a sharded state dict to plain data, by a name that is the same in every job of this layout.

    Left out: ``args`` (paths and flags differ between jobs) and the uninitialised padding between parameters that
    Megatron's ``dp_reshardable`` optimizer state carries along.
    """
    if isinstance(state, dict | list):
        if isinstance(state, dict) and _is_padding(state.get("padding")):
            return {}
        found: dict[str, dict[str, Any]] = {}
        for name, value in state.items() if isinstance(state, dict) else enumerate(state):
            if (path, name) != ("", "args"):
                found |= described(value, f"{path}/{name}")
        return found
    if isinstance(state, ShardedTensor):
        return {f"{state.key}@{list(state.global_offset)}": _tensor(state)}
    if isinstance(state, ShardedObject):
        return {state.unique_key: {"kind": "object", "key": state.unique_key, "data": state.data}}
    if isinstance(state, LocalNonpersistentObject):
        return {}
    return {path: {"kind": "common", "data": state}}


def _is_padding(mark: Any) -> bool:
    return isinstance(mark, LocalNonpersistentObject) and bool(mark.obj)


def _tensor(shard: ShardedTensor) -> dict[str, Any]:
    sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return {
        "kind": "tensor",
        "key": shard.key,
        "offset": tuple(shard.global_offset),
        "data": shard.data.detach().clone().view(sizes),
    }


def keep_every_save(folder: Path) -> None:
    """Make Megatron's save write its state dict to ``folder`` first."""
    _keep_sharded_state(folder)
    _keep_dtensors(folder)


def _keep_sharded_state(folder: Path) -> None:
    stock = checkpointing.generate_state_dict

    @wraps(stock)
    def generate_state_dict(*args: Any, **options: Any) -> Any:
        state = stock(*args, **options)
        step = options.get("iteration")
        if step is not None and get_args().ckpt_format != "fsdp_dtensor":
            torch.save(described(state), folder / f"{step}.{dist.get_rank()}.pt")
        return state

    checkpointing.generate_state_dict = generate_state_dict


def _keep_dtensors(folder: Path) -> None:
    """What ``fsdp_dtensor`` saves is what this function of Megatron returns; it also prepares loads."""
    stock = checkpointing.preprocess_fsdp_dtensor_state_dict

    @wraps(stock)
    def preprocess_fsdp_dtensor_state_dict(*args: Any, **options: Any) -> Any:
        state = stock(*args, **options)
        if "iteration" in state:
            torch.save(described_shards(state), folder / f"{state['iteration']}.{dist.get_rank()}.pt")
        return state

    checkpointing.preprocess_fsdp_dtensor_state_dict = preprocess_fsdp_dtensor_state_dict


def keep_every_loss(folder: Path) -> None:
    """Append the loss of each iteration, exactly, to a file of this rank."""
    stock = training.train_step

    @wraps(stock)
    def train_step(*args: Any, **options: Any) -> Any:
        result = stock(*args, **options)
        with open(folder / f"losses.{dist.get_rank()}", "a") as file:
            losses = {name: float(loss).hex() for name, loss in result[0].items()}
            file.write(json.dumps([get_args().curr_iteration + 1, losses]) + "\n")
        return result

    training.train_step = train_step


def main() -> None:
    """Run the script that the environment names, with this process's arguments."""
    if os.environ.get("STATE_DUMP_STOCK"):
        megatron_ckpt_ext.install().close()
    folder, script = Path(os.environ["STATE_DUMP_FOLDER"]), os.environ["STATE_DUMP_SCRIPT"]
    folder.mkdir(exist_ok=True)
    keep_every_save(folder)
    keep_every_loss(folder)
    sys.argv[0] = script
    sys.path.insert(0, str(Path(script).resolve().parent))
    exec(compile(Path(script).read_bytes(), script, "exec"), {"__name__": "__main__", "__file__": script})


if __name__ == "__main__":
    main()
