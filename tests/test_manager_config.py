"""The settings of a ``CheckpointManager`` and their flags."""

import argparse
from dataclasses import fields
from typing import Any

import pytest

from megatron_ckpt_ext.arguments.manager_flags import MANAGER_FLAGS, add_manager_args
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.manager.config import ManagerConfig


def parsed(*words: str, prefix: str = "ckpt") -> argparse.Namespace:
    return add_manager_args(argparse.ArgumentParser(), prefix).parse_args(words)


def test_each_setting_is_a_flag() -> None:
    assert list(MANAGER_FLAGS) == [field.name for field in fields(ManagerConfig)]


def test_nothing_given_is_nothing_in_the_namespace_and_synchronous() -> None:
    assert vars(parsed()) == {}
    assert ManagerConfig.from_args(parsed()) == ManagerConfig()
    assert not ManagerConfig().async_save


@pytest.mark.parametrize("prefix", ["ckpt", "trainer.ckpt"])
def test_every_flag_reaches_its_setting_under_any_prefix(prefix: str) -> None:
    words = {
        "async-save": None,
        "keep-last": "3",
        "keep-interval": "100",
        "ckpt-metadata": "layout",
        "ckpt-metadata-create": None,
        "ckpt-metadata-on-drift": "fail",
        "writer": "process",
        "subdirectory": "trainer",
        "staging-limit": "1000",
        "save-timeout": "60",
        "files-per-rank": "2",
        "events": "events",
    }
    line = [word for name, value in words.items() for word in (f"--{prefix}.{name}", value) if word]

    config = ManagerConfig.from_args(parsed(*line, f"--no-{prefix}.progress", prefix=prefix), prefix)

    assert config == ManagerConfig(
        async_save=True,
        keep_last=3,
        keep_interval=100,
        ckpt_metadata="layout",
        ckpt_metadata_create=True,
        ckpt_metadata_on_drift="fail",
        writer="process",
        subdirectory="trainer",
        staging_limit=1000,
        save_timeout=60.0,
        files_per_rank=2,
        events="events",
        progress=False,
    )


def test_two_prefixes_live_in_one_parser() -> None:
    parser = add_manager_args(add_manager_args(argparse.ArgumentParser(), "actor"), "critic")
    args = parser.parse_args(["--actor.keep-last", "2"])

    assert ManagerConfig.from_args(args, "actor").keep_last == 2
    assert ManagerConfig.from_args(args, "critic") == ManagerConfig()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"keep_last": 0}, "keep_last is 0, not a number from 1 on: leave it out for none"),
        ({"keep_interval": -1}, "keep_interval is -1, not a number from 1 on: leave it out for none"),
        ({"files_per_rank": 0}, "files_per_rank is 0, not a number from 1 on: leave it out for none"),
        ({"writer": "fork"}, "writer is 'fork', not thread or process: choose one"),
        (
            {"ckpt_metadata": "f", "ckpt_metadata_on_drift": "ignore"},
            "ckpt_metadata_on_drift is 'ignore', not rebuild or fail: choose one",
        ),
        ({"save_timeout": 0.0}, "save_timeout is 0.0, not a number of seconds between 0 and a year: give one"),
        (
            {"ckpt_metadata_create": True},
            "ckpt_metadata_create was given without ckpt_metadata: add the path of the file",
        ),
        (
            {"ckpt_metadata_on_drift": "fail"},
            "ckpt_metadata_on_drift was given without ckpt_metadata: add the path of the file",
        ),
        ({"writer": "process"}, 'writer "process" was given without async_save: add it, or leave writer out'),
    ],
)
def test_what_cannot_be_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        ManagerConfig(**settings)

    assert str(error.value) == sentence
