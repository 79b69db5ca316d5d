"""The names of megatron.bridge that compat.bridge relies on are where it says."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("megatron.bridge", reason="make bridge installs it")

from megatron.bridge.training import checkpointing
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.utils.checkpoint_utils import (
    TRACKER_PREFIX,
    get_checkpoint_tracker_filename,
    get_checkpoint_train_state_filename,
)

from megatron_ckpt_ext.compat import bridge
from megatron_ckpt_ext.compat.mcore import is_collective_finalizer, is_optional_finalizer
from megatron_ckpt_ext.compat.megatron_sites import find_sites


def named(qualname: str) -> Callable[[], None]:
    def finalizer() -> None: ...

    finalizer.__qualname__ = qualname
    return finalizer


def nested_in_save_checkpoint() -> dict[str, Callable[[], None]]:
    """Name of each function that ``save_checkpoint`` makes -> one that is called the same."""
    code = checkpointing.save_checkpoint.__code__
    return {each.co_name: named(each.co_qualname) for each in code.co_consts if hasattr(each, "co_qualname")}


def test_every_name_is_where_it_is_looked_up() -> None:
    found, missing = find_sites(bridge.SITES)

    assert missing == []
    assert set(found) == set(bridge.SITES)
    assert bridge.unmatched() is None
    assert bridge.checkpointing() is checkpointing


def test_a_name_that_has_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(checkpointing, "schedule_async_save")
    monkeypatch.setattr(GlobalState, "initialize_async_checkpoint_worker", lambda self: None)

    said = bridge.unmatched() or ""
    assert said.startswith("megatron-bridge has no schedule")
    assert "queue" in said


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (bridge.is_tracker_finalizer, {"train_state_finalize_fn"}),
        (is_collective_finalizer, {"_post_save_global_barrier"}),
        (is_optional_finalizer, {"wandb_finalize_fn", "mlflow_finalize_fn", "comet_finalize_fn"}),
    ],
)
def test_finalizers_are_what_their_names_say(kind: Callable[[Callable[[], None]], bool], names: set[str]) -> None:
    assert {name for name, finalizer in nested_in_save_checkpoint().items() if kind(finalizer)} == names


def test_files_have_the_names_that_bridge_gives_them() -> None:
    state = get_checkpoint_train_state_filename("", prefix=TRACKER_PREFIX)

    assert bridge.TRACKERS == (Path(state).name, Path(get_checkpoint_tracker_filename("")).name)
    assert bridge.DATALOADER_STATES == checkpointing.DATALOADER_STATE_SUBDIR
