"""Names of ``megatron.training`` that ``compat.megatron_training`` reads and ``integrations.megatron_lm`` replaces.

One test fails when one of them moves or changes its meaning, as in ``test_compat.py``.
"""

import dis
import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from types import CodeType
from typing import Any

import pytest

from megatron_ckpt_ext.arguments import add_ckpt_ext_args
from megatron_ckpt_ext.commit.queue import DEFAULT_TIMEOUT, AsyncSaveQueue
from megatron_ckpt_ext.compat import megatron_training
from megatron_ckpt_ext.compat.megatron_sites import FSDP_SITES, SITES, Site, find_sites
from megatron_ckpt_ext.integrations.fingerprint import files_per_rank, optimizer_sharding
from megatron_ckpt_ext.integrations.megatron_lm import Installation
from megatron_ckpt_ext.integrations.megatron_queue import WarmWriter, megatron_queue


def globals_read(code: CodeType) -> Iterator[str]:
    """Names that a function, or one inside it, looks up in its module each time it runs."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from globals_read(constant)


FOUND, _ = find_sites(SITES)
FOUND_FSDP, _ = find_sites(FSDP_SITES)
PLACES = [
    site
    for known, found in ((SITES, FOUND), (FSDP_SITES, FOUND_FSDP))
    for key, alternatives in known.items()
    for sites in alternatives
    if found[key] in sites
    for site in sites
]
"""Every place of the installed Megatron where a replaced name is looked up."""


def test_every_site_of_the_installed_megatron_is_found() -> None:
    assert [missing for known in (SITES, FSDP_SITES) for missing in find_sites(known)[1]] == []


@pytest.mark.parametrize("site", PLACES, ids=str)
def test_a_replaced_name_is_looked_up_when_it_is_used(site: Site) -> None:
    function = inspect.unwrap(getattr(site.owner, site.user))

    assert function.__globals__ is vars(site.owner)
    assert site.name in globals_read(function.__code__)


def test_everything_that_is_replaced_is_tried_above() -> None:
    installation = Installation()
    installation.close()

    tried = {f"megatron.training.{site.module}.{site.name}" for site in PLACES}
    passed_on = {
        "megatron.training.checkpointing.save_checkpoint",  # for scripts that import it from there
        "megatron.core.transformer.fsdp_dtensor_checkpoint.make_fsdp_dtensor",
    }
    assert set(installation.hooks) == tried | passed_on


@pytest.mark.parametrize("options", [[], ["--async-save", "--ckpt-save-timeout", "60"]], ids=["stock", "ours"])
def test_megatron_is_given_the_queue_that_was_asked_for(options: list[str]) -> None:
    from megatron.training import async_utils

    installation = Installation()
    try:
        args = add_ckpt_ext_args(ArgumentParser()).parse_args(options)
        args.save = "somewhere"
        installation.check(args)
        name, modules = async_utils.get_async_strategy("nvrx")
        single = async_utils.get_async_strategy("nvrx", "CachedMetadataFileSystemReader")
    finally:
        installation.close()

    assert name == "nvrx"
    assert issubclass(modules["AsyncCallsQueue"], AsyncSaveQueue) == bool(options)
    assert {key for key, value in async_utils.get_async_strategy("nvrx")[1].items() if modules[key] is not value} == (
        {"AsyncCallsQueue", "get_write_results_queue"} if options else set()
    )
    assert single == ("nvrx", modules["CachedMetadataFileSystemReader"])


def test_our_queue_has_what_megatron_asks_nvrxs_queue_for() -> None:
    """Megatron inspects both signatures before it passes options on."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

    ours: Any = megatron_queue(WarmWriter(), DEFAULT_TIMEOUT)
    for name in ("__init__", "warmup_persistent_caller"):
        theirs = inspect.signature(getattr(AsyncCallsQueue, name)).parameters
        assert theirs.keys() <= inspect.signature(getattr(ours, name)).parameters.keys()
    for name in ("schedule_async_request", "maybe_finalize_async_calls", "get_num_unfinalized_calls", "close"):
        theirs = inspect.signature(getattr(AsyncCallsQueue, name)).parameters
        assert list(theirs) == list(inspect.signature(getattr(ours, name)).parameters)


def test_saves_in_flight_are_counted_in_megatrons_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import async_utils

    monkeypatch.setattr(async_utils, "_async_calls_queue", None)
    assert megatron_training.unfinalized_saves() == 0
    queue = WarmWriter()
    monkeypatch.setattr(queue, "get_num_unfinalized_calls", lambda: 3, raising=False)
    monkeypatch.setattr(async_utils, "_async_calls_queue", queue)
    assert megatron_training.unfinalized_saves() == 3


@pytest.mark.parametrize("reshardable", [True, False])
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("layer_wise", [True, False])
def test_optimizer_sharding_is_what_megatron_decides(reshardable: bool, distributed: bool, layer_wise: bool) -> None:
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata

    args = Namespace(
        use_distributed_optimizer=distributed,
        use_layer_wise_distributed_optimizer=layer_wise,
        dist_ckpt_optim_fully_reshardable=reshardable,
        distrib_optim_fully_reshardable_mem_efficient=False,
        ckpt_format="torch_dist",
    )

    if layer_wise and "layer_wise" not in inspect.getsource(_build_sharded_state_dict_metadata):
        pytest.skip("this release has no such optimizer")
    decided = _build_sharded_state_dict_metadata(args, dp_cp_group=object())
    assert optimizer_sharding(args) == decided.get("distrib_optim_sharding_type", "none")


@pytest.mark.parametrize("constant", [True, False])
def test_workers_are_used_with_a_constant_structure_only(constant: bool) -> None:
    """Megatron sets them on the strategy under that condition, nowhere else."""
    from megatron.training.checkpointing import save_checkpoint

    args = Namespace(dist_ckpt_workers=4, ckpt_assume_constant_structure=constant)
    assert files_per_rank(args) == (4 if constant else 1)
    source = " ".join(inspect.getsource(inspect.unwrap(save_checkpoint)).split())
    condition = "if args.ckpt_assume_constant_structure and args.ckpt_format == 'torch_dist':"
    assert "thread_count = args.dist_ckpt_workers" in source.split(condition)[1]
    assert "thread_count" not in source.split(condition)[0]


def test_the_installed_versions_are_supported() -> None:
    assert megatron_training.unsupported_reason() is None
