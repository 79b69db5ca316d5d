"""The settings as a whole: what cannot work is refused with the flag at fault and the remedy."""

from argparse import ArgumentParser, Namespace
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from ranks import RankPool

from megatron_ckpt_ext.arguments import add_ckpt_ext_args
from megatron_ckpt_ext.config import CkptExtConfig
from megatron_ckpt_ext.errors import ConfigurationError

VALID: dict[str, Any] = {"ckpt_metadata": "prepared", "async_save": True, "save": "checkpoints"}
DTENSORS: dict[str, Any] = {"ckpt_format": "fsdp_dtensor", "async_save": True, "save": "checkpoints"}
REFUSED = [
    ({"ckpt_metadata": None, "ckpt_metadata_create": True}, "--ckpt-metadata-create", "add --ckpt-metadata FILE"),
    ({"ckpt_metadata": ""}, "--ckpt-metadata", "name the prepared metadata file"),
    ({"async_save": False}, "--async-save", "add --async-save"),
    ({"use_persistent_ckpt_worker": False}, "--use-persistent-ckpt-worker", "add --use-persistent-ckpt-worker"),
    ({"async_strategy": "mcore"}, "--async-strategy mcore", "remove it or say nvrx"),
    ({"ckpt_format": "fsdp_dtensor", "async_save": False}, "--async-save", "add --async-save"),
    ({"ckpt_format": "torch"}, "--ckpt-format torch:", "use torch_dist or fsdp_dtensor"),
    ({"ckpt_format": "torch_dcp"}, "--ckpt-format torch_dcp", "use torch_dist or fsdp_dtensor"),
    *(
        (
            {
                "ckpt_format": "fsdp_dtensor",
                "save": "msc://profile/run",
                "enable_msc": True,
                "async_strategy": strategy,
            },
            "--ckpt-format fsdp_dtensor and --save msc://profile/run",
            "save to a directory",
        )
        for strategy in ("nvrx", "mcore")
    ),
    ({"async_save": False}, "--async-save", "asynchronous saves, of torch_dist and fsdp_dtensor"),
    ({"save": None}, "--save", "add --save DIRECTORY"),
    ({"save": ""}, "--save", "add --save DIRECTORY"),
    ({"ckpt_metadata": "msc://profile/prepared"}, "--ckpt-metadata msc://profile/prepared", "name a file on a local"),
    ({"save": "msc://profile/run"}, "--save msc://profile/run but without --enable-msc", "add --enable-msc"),
    *(
        ({"ckpt_save_timeout": seconds}, f"--ckpt-save-timeout {seconds:g} ", "the longest pause of your storage")
        for seconds in (0.0, -1.0, float("nan"), float("inf"), 365 * 86400.0)
    ),
    ({"ckpt_metadata": None, "ckpt_save_timeout": 0.0}, "--ckpt-save-timeout 0 ", "the longest pause of your storage"),
]


@pytest.mark.parametrize(("change", "flag", "remedy"), REFUSED, ids=[str(change) for change, _, _ in REFUSED])
def test_what_cannot_work_is_refused(change: dict[str, Any], flag: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        CkptExtConfig(**{**VALID, **change})

    assert flag in str(caught.value)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_the_missing_worker_is_named_and_not_the_async_save_that_megatron_clears() -> None:
    with pytest.raises(ConfigurationError, match="but without --use-persistent-ckpt-worker"):
        CkptExtConfig(**VALID, use_persistent_ckpt_worker=False)


@pytest.mark.parametrize("strategy", ["nvrx", "mcore"])
def test_prepared_metadata_and_a_timeout_go_with_dtensors(strategy: str) -> None:
    config = CkptExtConfig(**DTENSORS, ckpt_metadata="prepared", ckpt_save_timeout=60.0, async_strategy=strategy)

    assert config.saves_dtensors


@pytest.mark.parametrize("create", [False, True])
def test_what_can_work_is_accepted_and_frozen(create: bool) -> None:
    config = CkptExtConfig(**VALID, ckpt_metadata_create=create)

    assert replace(config) == config
    with pytest.raises(FrozenInstanceError):
        config.save = "elsewhere"  # type: ignore[misc]


@pytest.mark.parametrize("save", ["checkpoints", "msc://profile/run"])
def test_the_multi_storage_client_is_accepted(save: str) -> None:
    CkptExtConfig(**{**VALID, "save": save}, enable_msc=True)


@pytest.mark.parametrize("change", [{"ckpt_format": "torch"}, {"save": None}, {"async_save": False}], ids=str)
def test_a_job_without_prepared_metadata_may_do_anything(change: dict[str, Any]) -> None:
    CkptExtConfig(**{**VALID, **change, "ckpt_metadata": None})


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({}, False),
        ({"async_save": True, "save": "checkpoints", "ckpt_events": "E"}, False),
        ({"async_save": True, "save": "checkpoints", "ckpt_save_timeout": 60.0}, True),
        (VALID, True),
        ({**VALID, "ckpt_save_timeout": 60.0}, True),
        (DTENSORS, True),
        ({**DTENSORS, "async_strategy": "mcore"}, True),
        ({**DTENSORS, "async_save": False}, False),
        ({**DTENSORS, "use_persistent_ckpt_worker": False}, False),
        ({**DTENSORS, "save": None}, False),
        ({**DTENSORS, "save": "msc://profile/run", "enable_msc": True}, False),
    ],
    ids=str,
)
def test_our_queue_is_in_charge_where_metadata_or_a_timeout_or_dtensors_are(given: dict[str, Any], ours: bool) -> None:
    assert CkptExtConfig(**given).owns_queue is ours


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"ckpt_save_timeout": 60.0},
            "--ckpt-save-timeout was given, but saves are not asynchronous: add --async-save",
        ),
        (
            {"async_save": True, "ckpt_save_timeout": 60.0},
            "--ckpt-save-timeout was given, but nothing is saved: add --save DIRECTORY",
        ),
        (
            {"async_save": True, "async_strategy": "mcore", "ckpt_save_timeout": 60.0},
            "without --async-strategy mcore, or leave it out",
        ),
        (
            {**DTENSORS, "save": "msc://profile/run", "async_strategy": "mcore", "ckpt_save_timeout": 60.0},
            "without --async-strategy mcore, or leave it out",
        ),
        ({"ckpt_save_timeout": 60.0}, "--ckpt-format torch_dist or fsdp_dtensor, "),
        (
            {"async_save": True, "ckpt_metadata_on_drift": "fail"},
            "--ckpt-metadata-on-drift fail was given without --ckpt-metadata: add --ckpt-metadata FILE",
        ),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        CkptExtConfig(**given)


def test_a_plain_parser_needs_no_flags_of_megatron() -> None:
    parser = add_ckpt_ext_args(ArgumentParser())
    parser.add_argument("--save")

    words = ["--async-save", "--ckpt-metadata", "prepared", "--save", "checkpoints"]

    assert CkptExtConfig.from_args(parser.parse_args(words)) == CkptExtConfig(**VALID)
    more = ["--ckpt-metadata-create", "--ckpt-metadata-on-drift", "fail", "--ckpt-save-timeout", "60"]
    assert CkptExtConfig.from_args(parser.parse_args(words + more)) == CkptExtConfig(
        **VALID, ckpt_metadata_create=True, ckpt_metadata_on_drift="fail", ckpt_save_timeout=60.0
    )
    assert CkptExtConfig.from_args(Namespace()) == CkptExtConfig()
    assert CkptExtConfig().ckpt_metadata_on_drift == "rebuild"


def _config_on_rank(command_line: list[str]) -> CkptExtConfig | str:
    """Parse as Megatron does; importing its parser takes seconds, so it is done in a rank that others use as well."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_ckpt_ext_args(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))
    try:
        return CkptExtConfig.from_args(parser.parse_args(command_line))
    except ConfigurationError as error:
        return str(error)


def test_the_command_line_of_megatron_is_checked(ranks: RankPool) -> None:
    def parsed(*command_line: str) -> CkptExtConfig | str:
        return ranks.run(_config_on_rank, ["--save", "checkpoints", *command_line], world_size=1)[0]

    worker = ["--async-save", "--use-persistent-ckpt-worker"]
    metadata = ["--ckpt-metadata", "prepared"]

    assert parsed(*worker, *metadata) == CkptExtConfig(**VALID)
    assert parsed() == CkptExtConfig(save="checkpoints", use_persistent_ckpt_worker=False)
    assert "without --async-save" in str(parsed(*metadata))
    assert "without --use-persistent-ckpt-worker" in str(parsed("--async-save", *metadata))
    assert "--async-strategy mcore" in str(parsed(*worker, *metadata, "--async-strategy", "mcore"))
    dtensors = parsed(*worker, *metadata, "--ckpt-format", "fsdp_dtensor")
    assert dtensors == CkptExtConfig(**VALID, ckpt_format="fsdp_dtensor")
    remote = ["--save", "msc://profile/run"]
    assert parsed(*worker, *metadata, *remote, "--enable-msc") == CkptExtConfig(
        **{**VALID, "save": "msc://profile/run"}, enable_msc=True
    )
    assert "--enable-msc" in str(parsed(*worker, *metadata, *remote))
