"""The checkpoint manager is one that Bridge accepts, and refuses a configuration that is not ours."""

from inspect import signature

import pytest

pytest.importorskip("megatron.bridge", reason="make bridge installs it")

from megatron.bridge.training.checkpointing import (
    CheckpointManager,
    DefaultCheckpointManager,
    create_checkpoint_manager,
)
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.integrations.bridge import PreparedCheckpointManager


@pytest.mark.parametrize("method", ["__init__", "save", "load", "finalize_async_saves"])
def test_methods_take_what_those_of_bridge_take(method: str) -> None:
    ours, bridges = (signature(getattr(each, method)) for each in (PreparedCheckpointManager, DefaultCheckpointManager))

    assert [(each.name, each.default, each.kind) for each in ours.parameters.values()] == [
        (each.name, each.default, each.kind) for each in bridges.parameters.values()
    ]


def test_it_has_all_of_the_protocol() -> None:
    methods = {name for name in vars(CheckpointManager) if not name.startswith("_")}

    assert methods == {"save", "load", "finalize_async_saves"}
    assert issubclass(PreparedCheckpointManager, DefaultCheckpointManager)


def test_a_configuration_that_is_not_ours_is_refused() -> None:
    register_allowed_target_prefix("megatron_ckpt_ext.")
    manager = f"{PreparedCheckpointManager.__module__}.{PreparedCheckpointManager.__qualname__}"

    with pytest.raises(ConfigurationError, match=r"call with_ckpt_ext\(cfg\)"):
        create_checkpoint_manager(CheckpointConfig(custom_manager_class=manager))
