"""``with_ckpt_ext``: settings of recipes and overrides, and what a configuration is written as."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.bridge", reason="make bridge installs it")

from bridge.tiny_gpt import tiny_gpt
from megatron.bridge.training.checkpointing import DefaultCheckpointManager
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
from megatron.bridge.utils.instantiate_utils import instantiate

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.integrations.bridge import CkptExtCheckpointConfig, PreparedCheckpointManager, with_ckpt_ext
from megatron_ckpt_ext.integrations.bridge.config import MANAGER

ROOT = Path(__file__).resolve().parents[2]
BRIDGES = f"{DefaultCheckpointManager.__module__}.{DefaultCheckpointManager.__qualname__}"


def overridden(*overrides: str, file: Path | None = None, **settings: Any) -> Any:
    config = with_ckpt_ext(tiny_gpt(), **settings)
    process_config_with_overrides(config, None if file is None else str(file), list(overrides))
    return config


def test_what_a_recipe_has_set_stays() -> None:
    recipe = tiny_gpt()
    recipe.checkpoint.most_recent_k, recipe.checkpoint.save = 7, "/somewhere"
    before = vars(recipe.checkpoint).copy()
    checkpoint = with_ckpt_ext(recipe, ckpt_metadata="/prepared").checkpoint

    assert isinstance(checkpoint, CkptExtCheckpointConfig)
    assert checkpoint.custom_manager_class == MANAGER
    assert checkpoint.ckpt_metadata == "/prepared"
    assert {name: vars(checkpoint)[name] for name in before} == before | {"custom_manager_class": MANAGER}


def test_a_recipe_may_pass_twice() -> None:
    checkpoint = with_ckpt_ext(with_ckpt_ext(tiny_gpt(), ckpt_metadata="/prepared"), async_save=True).checkpoint

    assert (checkpoint.ckpt_metadata, checkpoint.async_save) == ("/prepared", True)


def test_a_setting_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"checkpoint\.ckpt_metadta was given"):
        with_ckpt_ext(tiny_gpt(), ckpt_metadta="/prepared")


def test_overrides_reach_our_settings() -> None:
    config = overridden("checkpoint.ckpt_metadata=/prepared", "checkpoint.ckpt_save_timeout=60")

    assert (config.checkpoint.ckpt_metadata, config.checkpoint.ckpt_save_timeout) == ("/prepared", 60)
    assert config.checkpoint.job is not None


def test_the_yaml_file_of_overrides_is_one() -> None:
    config = overridden("checkpoint.ckpt_metadata=/prepared", file=ROOT / "recipes" / "bridge" / "overrides.yaml")

    assert (config.checkpoint.async_save, config.checkpoint.ckpt_metadata_create) == (True, True)
    config.checkpoint.finalize()
    assert config.checkpoint.async_strategy == "nvrx"


@pytest.mark.parametrize("late", [True, False])
def test_the_strategy_is_nvrx_however_late_saves_become_asynchronous(late: bool) -> None:
    config = overridden(*["checkpoint.async_save=true"] * late, async_save=not late)

    if late:
        assert config.checkpoint.async_strategy == "mcore"  # what Bridge leaves, and what does not work
    config.checkpoint.finalize()
    assert config.checkpoint.async_strategy == "nvrx"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["checkpoint.ckpt_metadata_create=true"], "checkpoint.ckpt_metadata_create"),
        (["checkpoint.ckpt_metadata_on_drift=maybe"], "checkpoint.ckpt_metadata_on_drift"),
        (["checkpoint.ckpt_save_timeout=-1"], "checkpoint.ckpt_save_timeout"),
    ],
)
def test_what_is_refused_is_named_as_bridge_names_it(overrides: list[str], words: str) -> None:
    config = overridden("checkpoint.save=/somewhere", *overrides)

    with pytest.raises(ConfigurationError) as caught:
        config.checkpoint.finalize()
    assert words in str(caught.value)
    assert "--" not in str(caught.value)


def test_a_checkpoint_keeps_a_configuration_that_bridge_alone_can_read() -> None:
    written = overridden("checkpoint.ckpt_metadata=/prepared").checkpoint.to_cfg_dict()

    read = instantiate(written)
    assert type(read) is CheckpointConfig
    assert read.custom_manager_class is None


class Derived(PreparedCheckpointManager):
    """A manager of a user."""


def test_a_manager_that_is_derived_from_ours_stays_and_is_written() -> None:
    name = f"{Derived.__module__}.{Derived.__qualname__}"
    recipe = tiny_gpt()
    recipe.checkpoint.custom_manager_class = name
    checkpoint = with_ckpt_ext(recipe).checkpoint

    checkpoint.finalize()
    assert checkpoint.job is not None
    assert checkpoint.to_cfg_dict()["custom_manager_class"] == name


def test_another_manager_is_refused() -> None:
    config = overridden(f"checkpoint.custom_manager_class={BRIDGES}")

    with pytest.raises(ConfigurationError, match="checkpoint.custom_manager_class is .*DefaultCheckpointManager, and"):
        config.checkpoint.finalize()


def test_without_a_manager_saves_are_left_to_bridge() -> None:
    config = overridden("checkpoint.custom_manager_class=null", "checkpoint.async_save=true")

    config.checkpoint.finalize()
    assert config.checkpoint.job is None
    assert config.checkpoint.async_strategy == "mcore"


def test_the_manager_is_the_public_one() -> None:
    assert f"{PreparedCheckpointManager.__module__.rpartition('.')[0]}.{PreparedCheckpointManager.__name__}" == MANAGER
