"""The public names and how they are called; other projects build on them, so they may grow but not change."""

import inspect
from importlib import import_module
from typing import Any

import pytest

import megatron_ckpt_ext
from megatron_ckpt_ext.commit.failures import MetadataReuseError, SaveFailedError, WriteFailedError
from megatron_ckpt_ext.errors import ConfigurationError, PreparedFileError

CALLS = {
    "install": "args",
    "PreparedMetadata.load": "path rank world_size expected coordinator",
    "PreparedMetadata.from_metadata": "metadata rank coordinator",
    "PreparedMetadata.create": "own fingerprint metadata",
    "PreparedSaveStrategy": (
        "args prepared_metadata ckpt_metadata_create_path on_drift fingerprint process_group on_commit "
        "results_in_answer kwargs"
    ),
    "save_state_dict_async_plan": (
        "state_dict storage_writer process_group coordinator_rank planner reuse_metadata_obj held_items local_plan"
    ),
    "save_state_dict_async_finalize": (
        "storage_writer global_metadata dist_wrapper reuse_metadata_obj create_metadata_path fingerprint on_drift"
    ),
    "AsyncSaveQueue": "settings timeout start_writer",
    "save_fsdp_dtensor": "state_dict checkpoint_dir saver settings",
    "FsdpDtensorSaver": (
        "process_group prepared_metadata ckpt_metadata_create_path on_drift async_save uneven fingerprint thread_count "
        "use_cpu_shm timeout settings start_writer mode on_commit"
    ),
    "SaveFailedError": "causes",
    "WriteFailedError": "causes",
    "MetadataReuseError": "causes",
    "verify_checkpoint": "path",
    "latest_complete_step": "directory subdirectory",
    "CheckpointManager": "directory config process_group on_saved allocator settings",
    "CheckpointManager.save": "self step state_dict",
    "CheckpointManager.wait_for_staging": "self",
    "CheckpointManager.poll": "self",
    "CheckpointManager.wait": "self",
    "CheckpointManager.latest_complete_step": "self",
    "CheckpointManager.load": "self state_dict step",
    "CheckpointManager.close": "self",
    "ManagerConfig.from_args": "args prefix",
    "arguments.add_ckpt_ext_args": "parser",
    "arguments.add_manager_args": "parser prefix",
}
"""Name below the package -> its parameters in order."""


@pytest.mark.parametrize("name", CALLS)
def test_a_public_name_is_called_as_before(name: str) -> None:
    head, _, rest = name.partition(".")
    found: Any = import_module("megatron_ckpt_ext.arguments") if head == "arguments" else None
    found = found or getattr(megatron_ckpt_ext, head)

    for part in filter(None, rest.split(".")):
        found = getattr(found, part)

    parameters = inspect.signature(found).parameters
    assert list(parameters) == CALLS[name].split()


def test_every_public_name_is_listed_and_reachable() -> None:
    assert {name.split(".")[0] for name in CALLS} - {"arguments"} == set(megatron_ckpt_ext.__all__)
    for name in megatron_ckpt_ext.__all__:
        assert name in dir(megatron_ckpt_ext)
        assert getattr(megatron_ckpt_ext, name).__name__ == name
        assert inspect.getdoc(getattr(megatron_ckpt_ext, name))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_the_kind'"):
        getattr(megatron_ckpt_ext, "nothing_of_the_kind")  # noqa: B009


def test_a_prepared_metadata_shows_its_fingerprint_and_slice() -> None:
    assert {"fingerprint", "slice"} <= set(megatron_ckpt_ext.PreparedMetadata.__dataclass_fields__)


def test_calls_of_the_upstream_proposal_need_nothing_new() -> None:
    """What it does not have must be optional, and its own two arguments are off by default."""
    plan = inspect.signature(megatron_ckpt_ext.save_state_dict_async_plan).parameters
    finalize = inspect.signature(megatron_ckpt_ext.save_state_dict_async_finalize).parameters

    assert [name for name, each in plan.items() if each.default is each.empty] == ["state_dict", "storage_writer"]
    required = ["storage_writer", "global_metadata", "dist_wrapper"]
    assert [name for name, each in finalize.items() if each.default is each.empty] == required
    assert plan["reuse_metadata_obj"].default is None
    assert finalize["reuse_metadata_obj"].default is None
    assert finalize["create_metadata_path"].default is None


@pytest.mark.parametrize("error", [ConfigurationError, PreparedFileError])
def test_configuration_errors_are_value_errors(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)


@pytest.mark.parametrize(("error", "kind"), [(WriteFailedError, "write"), (MetadataReuseError, "metadata_reuse")])
def test_errors_of_a_save_are_torchs(error: type[SaveFailedError], kind: str) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    assert issubclass(error, CheckpointException)
    assert issubclass(error, Exception)
    assert error.kind == kind
