"""An FSDP2 state dict that changes between saves: the same save is completed, and later ones reuse again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensor_jobs import (
    FINALIZE,
    INLINE,
    Counts,
    Seen,
    StateDict,
    Trainer,
    assert_complete,
    differing,
    everything_in,
    reusing,
    saved,
)
from ranks import RankPool
from torch.distributed.tensor import Shard, distribute_tensor
from workload import heard

from megatron_ckpt_ext.commit.commit import How, OnDrift
from megatron_ckpt_ext.commit.failures import MetadataReuseError, SaveFailedError, WriteFailedError
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.strategy.fsdp_dtensor import FsdpDtensorSaver

REUSED, REBUILT, TOGETHER = How.REUSED.value, How.REBUILT.value, How.TOGETHER.value
MADE_ANEW: Counts = {
    FINALIZE: {"all_reduce": 1, "gather_object": 1, "broadcast_object_list": 1, "all_gather_object": 1},
}


def right(trainer: Trainer) -> StateDict:
    return trainer.state(note="text", table=torch.arange(6.0))


def tensor_added(state: StateDict, trainer: Trainer) -> None:
    state["model"]["new.weight"] = distribute_tensor(torch.randn(7, 2), trainer.mesh, [Shard(0)])


def plain_tensor_added(state: StateDict, trainer: Trainer) -> None:
    state["new"] = torch.ones(3)


def object_added(state: StateDict, trainer: Trainer) -> None:
    state["new"] = "text"


def removed(state: StateDict, trainer: Trainer) -> None:
    del state["model"]["1.weight"]


def retyped(state: StateDict, trainer: Trainer) -> None:
    state["model"]["1.weight"] = state["model"]["1.weight"].to(torch.bfloat16)
    state["table"] = state["table"].to(torch.float16)


def resharded(state: StateDict, trainer: Trainer) -> None:
    state["model"]["1.weight"] = state["model"]["1.weight"].redistribute(placements=[Shard(1)])


def outgrown(state: StateDict, trainer: Trainer) -> None:
    state["note"] = "text" * 5000


CHANGES: dict[Callable[[StateDict, Trainer], None], str] = {
    tensor_added: "new.weight at offset",
    plain_tensor_added: "new at offset [0]",
    object_added: "new does not match",
    removed: "model.1.weight at offset",
    retyped: "model.1.weight at offset",
    resharded: "model.1.weight at offset",
    outgrown: "note does not match",
}


def series_on_rank(directory: str) -> dict[str, tuple[list[Seen], list[str]]]:
    """For each change: save it twice, following a layout that was made without it, and then save without it again."""
    trainer = Trainer(seed=3)
    trainer.step()
    file = f"{directory}/prepared.metadata"
    with FsdpDtensorSaver(ckpt_metadata_create_path=file, mode=INLINE) as saver:
        saved(saver, f"{directory}/created", right(trainer))
        prepared = saver.prepared
    found = {}
    for change in CHANGES:
        with heard() as warnings, FsdpDtensorSaver(prepared_metadata=prepared, mode=INLINE) as saver:
            seen = []
            for number in (1, 2):
                trainer.step()
                state = right(trainer)
                change(state, trainer)
                seen.append(saved(saver, f"{directory}/{change.__name__}_{number}", state))
        found[change.__name__] = (seen, warnings)
    return found


@pytest.fixture(scope="module")
def changes(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("drift")
    return directory, ranks.run(series_on_rank, str(directory))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_drift_completes_the_same_save(
    changes: tuple[Path, list[dict[str, Any]]], change: Callable[[StateDict, Trainer], None]
) -> None:
    directory, by_rank = changes
    for rank, found in enumerate(by_rank):
        seen, warnings = found[change.__name__]
        assert [each.how for each in seen] == [REBUILT, REUSED]
        assert CHANGES[change] in seen[0].reason
        assert [each.counts for each in seen] == [MADE_ANEW, {FINALIZE: {"all_reduce": 1}}]
        assert len(warnings) == (1 if rank == 0 else 0)
    for number in (1, 2):
        target = directory / f"{change.__name__}_{number}"
        assert_complete(target)
        assert differing(everything_in(target), by_rank[0][change.__name__][0][number - 1].values) == []


def slots_on_rank(directory: str) -> list[Seen]:
    """Objects change their length within their slot, scalars their value."""
    trainer = Trainer(seed=3)
    seen = []
    with FsdpDtensorSaver(mode=INLINE) as saver:
        for number in (1, 2, 3):
            trainer.step()
            seen.append(
                saved(saver, f"{directory}/{number}", trainer.state(note="x" * (number * 120), step=256**number))
            )
    return seen


def test_what_moves_in_its_slot_moves_nothing(ranks: RankPool, tmp_path: Path) -> None:
    seen = ranks.run(slots_on_rank, str(tmp_path))

    assert [[each.how for each in rank] for rank in seen] == [[TOGETHER, REUSED, REUSED]] * 2
    for number in (1, 2, 3):
        assert differing(everything_in(tmp_path / str(number)), seen[0][number - 1].values) == []


def lost_on_rank(directory: str) -> tuple[list[str], list[str]]:
    """A rank does not hold an object any more that it writes; then drift that is to fail; then all is right again."""
    trainer, rank = Trainer(seed=3), dist.get_rank()
    errors, how = [], []
    with FsdpDtensorSaver(mode=INLINE, on_commit=lambda committed: how.append(committed.how.value)) as saver:
        saved(saver, f"{directory}/0", right(trainer))
        assert saver.prepared is not None
        state = right(trainer)
        if any(item.fqn == "note" for item in saver.prepared.slice.locators):
            del state["note"]
        try:
            finish(saver, f"{directory}/1", state)
        except WriteFailedError as error:
            errors.append(str(error))
        saved(saver, f"{directory}/2", right(trainer))
        kept: PreparedMetadata | None = saver.prepared
    with FsdpDtensorSaver(prepared_metadata=kept, mode=INLINE, on_drift=OnDrift.FAIL) as saver:
        state = right(trainer)
        if rank == 1:
            state["only on rank 1"] = 1
        try:
            finish(saver, f"{directory}/3", state)
        except MetadataReuseError as error:
            errors.append(str(error))
    return errors, how


def finish(saver: FsdpDtensorSaver, directory: str, state: StateDict) -> None:
    request = saver.request(state, directory)
    request.execute_sync()


def test_what_cannot_be_rebuilt_fails_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (lost, refused), how = ranks.run(lost_on_rank, str(tmp_path))[0]

    assert "still holds note, but nobody wrote it" in lost
    assert "only on rank 1 does not match the prepared metadata" in refused
    assert how == [TOGETHER, TOGETHER]
    for number in (1, 3):
        assert not (tmp_path / str(number) / ".metadata").exists()
    assert_complete(tmp_path / "2")


def resumed_from_plain_on_rank(directory: str) -> list[str]:
    """Follow a checkpoint's own ``.metadata``, which does not say who holds what."""
    trainer, how = Trainer(seed=3), []
    with FsdpDtensorSaver(mode=INLINE) as saver:
        saved(saver, f"{directory}/1", right(trainer))
    with FsdpDtensorSaver(prepared_metadata=reusing(f"{directory}/1/.metadata"), mode=INLINE) as saver:
        for number in (2, 3):
            trainer.step()
            how.append(saved(saver, f"{directory}/{number}", right(trainer)).how)
    return how


def test_any_checkpoint_can_be_followed(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(resumed_from_plain_on_rank, str(tmp_path)) == [[REUSED, REUSED]] * 2


class Unsaveable:
    """A stateful part of a trainer that has no state on one rank."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def state_dict(self) -> StateDict:
        if dist.get_rank() == 1:
            raise RuntimeError("this optimizer has no state")
        return self.trainer.state()

    def load_state_dict(self, state_dict: StateDict) -> None:
        raise NotImplementedError


def plain_on_rank(trainer: Trainer) -> StateDict:
    """A rank's own part of the optimizer state, without its placement."""
    state = trainer.state()
    if dist.get_rank() == 1:
        state["state"] = {"1.weight": {"exp_avg": torch.zeros(trainer.state()["model"]["1.weight"].shape)}}
    return state


REFUSED: dict[str, tuple[Callable[[Trainer], Any], str]] = {
    "stateful": (lambda trainer: {"part": Unsaveable(trainer)}, "RuntimeError: this optimizer has no state"),
    "plain_state": (plain_on_rank, "state.1.weight.exp_avg"),
}


def refused_on_rank(directory: str, kind: str, follows: bool) -> tuple[str, list[str]]:
    """A save that one rank cannot plan, first of a job or behind another one; then one that it can."""
    trainer, how = Trainer(3), []
    with FsdpDtensorSaver(mode=INLINE) as saver:
        if follows:
            how.append(saved(saver, f"{directory}/0", trainer.state()).how)
        with pytest.raises(SaveFailedError) as error:
            finish(saver, f"{directory}/1", REFUSED[kind][0](trainer))
        how += [saved(saver, f"{directory}/{number}", trainer.state()).how for number in (2, 3)]
    return str(error.value), how


@pytest.mark.parametrize("follows", [False, True], ids=["first", "follows"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_one_rank_cannot_save_is_told_on_all(ranks: RankPool, tmp_path: Path, kind: str, follows: bool) -> None:
    found = ranks.run(refused_on_rank, str(tmp_path), kind, follows, world_size=2)

    for cause, how in found:
        assert "rank 1: " in cause and REFUSED[kind][1] in cause
        assert how[-2:] == [TOGETHER, REUSED]
    assert found[0] == found[1]
    assert not (tmp_path / "1" / ".metadata").exists()
