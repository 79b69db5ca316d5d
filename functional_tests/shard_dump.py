"""The state dict of an ``fsdp_dtensor`` save as plain data, and the whole tensors that the shards of all ranks make up.

Nothing here asks the extension or Megatron where a shard lies: shards are put one behind the other, in the order of
the mesh coordinates of their ranks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compare import equal, load_with_dcp
from torch.distributed.tensor import DTensor

from megatron_ckpt_ext.compat.dtensor import flattened, shard_dim

__all__ = ["described_shards", "differences_from_memory"]


def described_shards(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Copy what a rank is about to save, by the key that it has in the checkpoint. No collectives.

    Left out: ``args``, which Megatron goes on changing.
    """
    return {key: _described(value) for key, value in flattened(state)[0].items() if key != "args"}


def _described(value: Any) -> dict[str, Any]:
    if not isinstance(value, DTensor):
        return {"kind": "value", "data": value}
    coordinate = value.device_mesh.get_coordinate() or ()
    dims = [shard_dim(placement) for placement in value.placements]
    return {
        "kind": "shard",
        "dim": next((dim for dim in dims if dim is not None), None),
        "place": tuple(at for at, dim in zip(coordinate, dims, strict=True) if dim is not None),
        "shape": tuple(value.shape),
        "data": value.to_local().detach().clone(),
    }


def differences_from_memory(checkpoint: Path, dump: Path, step: int, *, ranks: int = 2) -> tuple[int, list[str]]:
    """Load a checkpoint with plain ``torch.distributed.checkpoint`` and compare it with what the ranks held.

    Returns:
        The number of items that were compared, and the names of those that differ, or are in one of both only.
    """
    held: dict[str, list[dict[str, Any]]] = {}
    for rank in range(ranks):
        loaded: dict[str, dict[str, Any]] = torch.load(dump / f"{step}.{rank}.pt", weights_only=False)
        for key, item in loaded.items():
            held.setdefault(key, []).append(item)
    saved = load_with_dcp(checkpoint)
    saved.pop("args", None)
    different = sorted(held.keys() ^ saved.keys())
    different += [key for key in held.keys() & saved.keys() if not _is_saved(saved[key], held[key])]
    return len(saved), different


def _is_saved(saved: Any, held: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a value is that of every rank that has it, and a tensor what the shards make up."""
    if held[0]["kind"] == "value":
        return all(equal(item["data"], saved) for item in held)
    by_place = {item["place"]: item for item in held}
    replicas = all(equal(item["data"], by_place[item["place"]]["data"]) for item in held)
    shards = [by_place[place]["data"] for place in sorted(by_place)]
    dim = held[0]["dim"]
    whole = shards[0] if dim is None else torch.cat(shards, dim)
    return replicas and tuple(whole.shape) == held[0]["shape"] and equal(whole, saved)
