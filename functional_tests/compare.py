"""Comparing what a job held with what its checkpoint gives back, bit for bit."""

import io
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

__all__ = ["differences_from_dcp", "differences_of_checkpoints", "differences_of_dumps", "equal", "load_with_dcp"]


def equal(left: Any, right: Any) -> bool:
    """Whether two values are the same, down to the bits of every tensor."""
    if isinstance(left, torch.Tensor):
        same_kind = isinstance(right, torch.Tensor) and left.dtype == right.dtype and left.shape == right.shape
        return same_kind and torch.equal(left.cpu(), right.cpu())
    if isinstance(left, io.BytesIO):
        return isinstance(right, io.BytesIO) and left.getvalue() == right.getvalue()
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(equal, left, right))
    if hasattr(left, "tolist"):
        return equal(left.tolist(), right.tolist())
    return bool(left == right)


def differences_of_dumps(
    left: Path, right: Path, step: int, *, ranks: int = 2, ignore: str = "rng_state"
) -> tuple[int, list[str]]:
    """Compare what two jobs held at ``step``.

    Args:
        left: dump folder of one job.
        right: of the other.
        step: iteration.
        ranks: of both jobs.
        ignore: beginning of names to leave out. torch's random state moves on between loading and the first save,
            when Megatron makes its data iterators.

    Returns:
        The number of items that were compared, and the names of those that differ.
    """
    compared, different = 0, []
    for rank in range(ranks):
        ours, theirs = (_without(_dump(folder, step, rank), ignore) for folder in (left, right))
        compared += len(ours)
        different += sorted(ours.keys() ^ theirs.keys())
        different += [name for name in ours.keys() & theirs.keys() if not equal(ours[name], theirs[name])]
    return compared, different


def differences_of_checkpoints(left: Path, right: Path) -> tuple[int, list[str]]:
    """Load two checkpoints with plain ``torch.distributed.checkpoint`` and compare them; ``args`` are left out.

    Returns:
        The number of items that were compared, and the names of those that differ.
    """
    ours, theirs = (load_with_dcp(each) for each in (left, right))
    for loaded in (ours, theirs):
        loaded.pop("args", None)  # paths and flags differ between jobs
    different = sorted(ours.keys() ^ theirs.keys())
    different += [name for name in ours.keys() & theirs.keys() if not equal(ours[name], theirs[name])]
    return len(ours), different


def differences_from_dcp(checkpoint: Path, dump: Path, step: int, *, ranks: int = 2) -> tuple[int, list[str]]:
    """Load a checkpoint with plain ``torch.distributed.checkpoint`` and compare it with what the job held.

    Returns:
        The number of items that were compared, and the names of those that differ.
    """
    loaded = load_with_dcp(checkpoint)
    common = _common(checkpoint, loaded)
    compared, different = 0, []
    for rank in range(ranks):
        for name, item in _dump(dump, step, rank).items():
            compared += 1
            found = _at(common, name) if item["kind"] == "common" else _from_checkpoint(loaded, item)
            if not equal(item["data"], found):
                different.append(name)
    return compared, different


def _common(checkpoint: Path, loaded: dict[str, Any]) -> Any:
    """What is not sharded: an item since megatron-core 0.19, a file of its own before."""
    item = next((value for name, value in loaded.items() if name.startswith("common_state")), None)
    return torch.load(checkpoint / "common.pt", weights_only=False) if item is None else item[0]


def _at(common: Any, path: str) -> Any:
    """Follow ``/key/key``; Megatron may have made a dictionary of a list."""
    for key in path.split("/")[1:]:
        known = common if isinstance(common, dict) else dict(enumerate(common))
        common = next((value for name, value in known.items() if str(name) == key), None)
        if common is None:
            return None
    return common


def _dump(folder: Path, step: int, rank: int) -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = torch.load(folder / f"{step}.{rank}.pt", weights_only=False)
    return loaded


def _without(items: dict[str, dict[str, Any]], beginning: str) -> dict[str, dict[str, Any]]:
    return {name: item for name, item in items.items() if not name.startswith(beginning)}


def load_with_dcp(checkpoint: Path) -> dict[str, Any]:
    """Load all of a checkpoint with plain ``torch.distributed.checkpoint``, in this process alone."""
    reader = FileSystemReader(checkpoint)
    state: dict[str, Any] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        state[name] = None
        if isinstance(entry, TensorStorageMetadata):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings(action="ignore"):  # torch says that one process loads
        load(state, storage_reader=reader, no_dist=True)
    return state


def _from_checkpoint(loaded: dict[str, Any], item: dict[str, Any]) -> Any:
    whole = loaded[item["key"]]
    if item["kind"] == "object":
        return whole[0]  # Megatron stores the list of objects of one key
    ranges = (slice(start, start + size) for start, size in zip(item["offset"], item["data"].shape, strict=True))
    return whole[tuple(ranges)]
