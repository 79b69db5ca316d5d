"""What a state of training was when its save began."""

import pytest

pytest.importorskip("megatron.bridge", reason="make bridge installs it")

from megatron.bridge.training.state import GlobalState, TrainState

from megatron_ckpt_ext.integrations.bridge.as_saved import StateAsSaved


def test_it_is_the_state_and_its_train_state_stands_still() -> None:
    state = GlobalState()
    state.train_state = TrainState(step=4)
    saved = StateAsSaved(state)
    state.train_state.step = 7

    assert (saved.train_state.step, state.train_state.step) == (4, 7)
    assert saved.cfg is state.cfg


def test_what_is_set_in_it_is_set_in_the_state() -> None:
    state = GlobalState()
    state.train_state = TrainState(step=4)
    saved = StateAsSaved(state)
    saved.start_time = 12.5

    assert state.start_time == 12.5
