"""A small FSDP2 model on real ranks, and what a checkpoint of it must hold. Functions named ``*_on_rank`` run there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron_ckpt_ext import verify_checkpoint
from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.commit.commit import Committed
from megatron_ckpt_ext.compat.dtensor import flattened
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.strategy.fsdp_dtensor import FinishedSave, FsdpDtensorSaver, StartedSave
from megatron_ckpt_ext.strategy.fsdp_dtensor_mode import Mode

type StateDict = dict[str, Any]
type Counts = dict[str, dict[str, int]]


class Trainer:
    """A model whose tensors no number of ranks divides: with 4 ranks one owns nothing of most, with 2 of the last."""

    def __init__(self, seed: int, mesh: DeviceMesh | None = None) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3), torch.nn.Linear(3, 1))
        for layer in self.model:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        """Train: every value is another one afterwards."""
        self.model(torch.randn(4, 5)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, **more: Any) -> StateDict:
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": self.model.state_dict(), "optimizer": optimizer, "scheduler": {"lr": [0.1, 0.2]}, **more}


def full(state_dict: StateDict) -> StateDict:
    """Key -> whole value, cloned. Called on all ranks: gathers every DTensor."""
    return {key: _whole(value) for key, value in flattened(state_dict)[0].items()}


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def differing(left: StateDict, right: StateDict) -> list[str]:
    """Keys whose values are not the same bit for bit."""
    return sorted(key for key in left.keys() | right.keys() if not _same(left.get(key), right.get(key)))


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return bool(left == right)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw of one save: plain data."""

    how: str
    reason: str | None
    counts: Counts
    values: StateDict
    kind: str
    """Name of the type that ``save`` returned."""


SAVE, FINALIZE = "save", "finalize"


INLINE = Mode(asynchronous=True, reason="the test writes itself")


def saved(saver: FsdpDtensorSaver, directory: str, state: StateDict, *, whole: bool = True) -> Seen:
    """Save to the end, with the collectives of both halves counted; the polls of a queue are counted as one."""
    expected = full(state) if whole else {}
    with CollectiveCounter() as counter:
        with counter.phase(SAVE):
            started = saver.request(state, directory) if saver.mode is INLINE else saver.save(state, directory)
        with spoiled(state), counter.phase(FINALIZE):
            committed = _finished(started)
        counts = counter.totals()
    if saver.mode.asynchronous and saver.mode is not INLINE:
        counts[FINALIZE]["all_reduce"] = 1
    return Seen(
        how=committed.how.value,
        reason=committed.reason,
        counts=counts,
        values=expected,
        kind=type(started).__name__,
    )


def _finished(started: Any) -> Committed:
    if isinstance(started, StartedSave | FinishedSave):
        return started.wait().committed
    arguments = list(started.async_fn_args)
    if started.preload_fn is not None:
        arguments[1] = started.preload_fn()
    started.async_fn(*arguments)
    (commit,) = started.finalize_fns
    committed: Committed = commit.run()
    return committed


@contextmanager
def spoiled(state: StateDict) -> Iterator[None]:
    """Train on while a save is written: it must have its own copy."""
    tensors = [value for value in flattened(state)[0].values() if isinstance(value, torch.Tensor)]
    shards = [(each.to_local() if isinstance(each, DTensor) else each).detach() for each in tensors]
    kept = [shard.clone() for shard in shards]
    for shard in shards:
        shard.fill_(77)
    try:
        yield
    finally:
        for shard, value in zip(shards, kept, strict=True):
            shard.copy_(value)


def loaded_on_rank(directories: list[str]) -> list[StateDict]:
    """Load each with stock ``dcp.load`` into a state of other values; return all of it, whole."""
    state = Trainer(seed=99).state()
    found = []
    for directory in directories:
        dcp.load(state, checkpoint_id=directory)  # type: ignore[attr-defined]  # public, not re-exported
        found.append(full(state))
    return found


def reusing(file: str) -> PreparedMetadata:
    return PreparedMetadata.load(file, dist.get_rank(), dist.get_world_size())


def everything_in(directory: Path) -> StateDict:
    """Read all of a checkpoint with torch's own converter, in this process alone."""
    target = directory.parent / f"{directory.name}.pt"
    dcp_to_torch_save(directory, target)
    return flattened(torch.load(target, weights_only=False))[0]


def assert_complete(directory: Path) -> None:
    report = verify_checkpoint(directory)
    assert report.complete, report.problems
    assert [path.name for path in directory.iterdir() if path.name.endswith(".tmp")] == []
