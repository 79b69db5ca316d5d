"""Releases that are not installed: Megatron-LM's main by its signatures of August 2026, and one that has moved a name.

The stand-ins have the recorded parameters and nothing else of what they stand for.
"""

import importlib.util
import inspect
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from megatron.training import checkpointing, training
from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async
from ranks import RankPool
from workload import Job, heard, state

from megatron_ckpt_ext.arguments import add_ckpt_ext_args
from megatron_ckpt_ext.commit.queue import DEFAULT_TIMEOUT
from megatron_ckpt_ext.compat import mcore, nvrx
from megatron_ckpt_ext.compat.megatron_sites import FSDP_SITES, SITES, Site, find_sites
from megatron_ckpt_ext.compat.megatron_training import unsupported_megatron, unsupported_nvrx
from megatron_ckpt_ext.config import CkptExtConfig
from megatron_ckpt_ext.integrations import megatron_lm
from megatron_ckpt_ext.integrations.megatron_lm import Installation
from megatron_ckpt_ext.integrations.megatron_queue import WarmWriter, megatron_queue
from megatron_ckpt_ext.strategy import fully_parallel
from megatron_ckpt_ext.strategy.fsdp_dtensor_mode import find_facts
from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

# Megatron-LM's main


class MainWrapper:
    """``FullyParallelSaveStrategyWrapper`` with the parameters that main has."""

    def __init__(
        self,
        strategy: Any,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        validate_access_integrity: bool = True,
        pg_cache_path: str | None = None,
        pg_cache_create: bool = False,
    ) -> None:
        self.base_strategy = strategy
        self.options = (do_cache_distribution, validate_access_integrity, pg_cache_path, pg_cache_create)


@pytest.fixture
def on_main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Our wrapper as a subclass of main's."""
    monkeypatch.setattr(mcore, "FullyParallelSaveStrategyWrapper", MainWrapper)
    spec = importlib.util.spec_from_file_location(fully_parallel.__name__, fully_parallel.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, fully_parallel.__name__, module)
    return module


def test_our_wrapper_takes_what_main_passes(on_main: ModuleType) -> None:
    installation = Installation()
    try:
        for strategy in (PreparedSaveStrategy(), mcore.TorchDistSaveShardedStrategy()):
            wrapper = installation._job.wrapper(
                strategy, None, True, validate_access_integrity=False, pg_cache_path="cache", pg_cache_create=True
            )
            assert isinstance(wrapper, MainWrapper)
            assert isinstance(wrapper, on_main.PreparedSaveWrapper) is isinstance(strategy, PreparedSaveStrategy)
            assert wrapper.options == (True, False, "cache", True)
    finally:
        installation.close()


def main_warms_up(queue: Any, rank: int, **supported: Any) -> dict[str, Any]:
    """What ``init_persistent_async_worker`` of main passes on: only what the class has a parameter for."""
    parameters = inspect.signature(queue.warmup_persistent_caller).parameters
    return {name: value for name, value in supported.items() if name in parameters}


def test_our_queue_is_not_given_what_it_does_not_know() -> None:
    queue: Any = megatron_queue(WarmWriter(), DEFAULT_TIMEOUT)

    passed = main_warms_up(queue, 0, cpu_shm_mode=True, otel_bootstrap=object())

    assert passed == {"cpu_shm_mode": True}


def test_flags_of_upstreams_own_feature_are_not_registered_twice() -> None:
    parser = ArgumentParser()
    parser.add_argument("--ckpt-metadata", type=str, default=None, help="upstream's")
    parser.add_argument("--ckpt-metadata-create", action="store_true")
    parser.add_argument("--async-save", action="store_true")

    args = add_ckpt_ext_args(parser).parse_args(
        ["--ckpt-metadata", "file", "--ckpt-metadata-create", "--ckpt-save-timeout", "60", "--async-save"]
    )
    args.save = "somewhere"

    config = CkptExtConfig.from_args(args)
    assert (config.ckpt_metadata, config.ckpt_metadata_create, config.ckpt_save_timeout) == ("file", True, 60.0)


def test_where_upstream_has_the_feature_ours_acts() -> None:
    """Upstream's ``save_checkpoint`` would set these on the strategy that it built, which is ours."""
    strategy = PreparedSaveStrategy(ckpt_metadata_create_path="ours")
    strategy.prepared_metadata, strategy.ckpt_metadata_create_path = object(), "theirs"

    assert strategy.handles("nvrx")
    assert strategy.prepared is None
    assert strategy._file is not None and strategy._file.path == "ours"


def test_callbacks_may_be_given_what_upstreams_feature_adds() -> None:
    """Only the stock method has them; ours does not come in between."""
    assert "_get_save_and_finalize_callbacks" not in vars(PreparedSaveStrategy)


def test_settings_that_main_has_and_we_do_not_know_are_left_alone() -> None:
    args = Namespace(
        save="somewhere",
        async_save=True,
        ckpt_format="torch_dist",
        ckpt_pg_tensors_cache_path="cache",
        ckpt_pg_tensors_cache_create=False,
        ckpt_fully_parallel_load_per_rank_objects=True,
        ckpt_metadata=None,
    )
    assert CkptExtConfig.from_args(args).ckpt_metadata is None


# What has moved


def moved_save_checkpoint(iteration: int) -> None:
    """A ``save_checkpoint`` that looks nothing up."""


def test_a_megatron_that_has_moved_a_name_is_run_stock_and_the_name_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert unsupported_megatron() is None
    monkeypatch.setattr(training, "save_checkpoint_and_time", moved_save_checkpoint)

    assert find_sites(SITES)[1] == ["save (training.save_checkpoint in save_checkpoint_and_time)"]
    with caplog.at_level("WARNING", megatron_lm.__name__):
        installation = megatron_lm.install()
    try:
        assert installation.hooks == ("megatron.training.arguments.add_megatron_arguments",)
        (warning,) = caplog.messages
        assert "saves are stock: megatron-core" in warning
        assert "has no save (training.save_checkpoint in save_checkpoint_and_time)" in warning
    finally:
        installation.close()


def test_a_name_that_is_there_and_looked_up_nowhere_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def save_checkpoint() -> None:
        """Looks up all but one."""

    monkeypatch.setattr(checkpointing, "save_checkpoint", save_checkpoint)

    missing = " ".join(find_sites(SITES)[1])
    assert all(f"{key} (checkpointing." in missing for key in ("tracker", "strategy", "wrapper", "schedule"))
    assert "or checkpointing.open_file" in missing
    assert [each.split(" (")[0] for each in find_sites(FSDP_SITES)[1]] == ["strategy", "finalize"]


@pytest.mark.parametrize("name", ["use_msc", "use_cpu_shm_for_gpu_tensors"])
def test_an_nvrx_without_an_argument_is_not_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    known = ["separation_hint", "use_msc", "use_cached_data_structure", "use_cpu_shm_for_gpu_tensors"]
    parameters = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in known if each != name]

    def init(self: Any, **options: Any) -> None:
        """Another writer's."""

    init.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    assert nvrx.unmatched() is None
    monkeypatch.setattr(nvrx.FileSystemWriterAsync, "__init__", init)

    assert nvrx.unmatched() == f"nvidia-resiliency-ext has no FileSystemWriterAsync({name}=)"
    assert find_facts(async_save=True).problem == nvrx.unmatched()
    installation = Installation()
    try:
        assert installation.unsupported == nvrx.unmatched()
        assert "megatron.training.async_utils.get_async_strategy" not in installation.hooks
    finally:
        installation.close()


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "nvidia-resiliency-ext is not installed"),
        ("0.5.0", "nvidia-resiliency-ext 0.5.0 is installed, 0.6 or later is needed"),
        ("0.6.0", None),
        ("1.2", None),
        ("of a fork", None),
    ],
)
def test_only_an_nvrx_that_megatron_refuses_is_refused_by_its_version(version: str | None, reason: str | None) -> None:
    assert unsupported_nvrx(version) == reason


def caching_on_rank(follows: bool, shared: bool) -> tuple[list[bool], list[str]]:
    """Whether a constant structure lets the writer keep tensors, asked twice, and the warnings."""
    with pytest.MonkeyPatch.context() as patch, heard() as warnings:
        if follows:
            patch.setattr(filesystem_async, "_compute_tensor_data_ptrs", None, raising=False)
        else:
            patch.delattr(filesystem_async, "_compute_tensor_data_ptrs", raising=False)
        strategy = PreparedSaveStrategy(ckpt_metadata_create_path="file")
        strategy.use_cached_ckpt_structure, strategy.cpu_shm_mode = True, shared
        found = [strategy._caches(), strategy._caches()]
    return found, warnings


@pytest.mark.parametrize(
    ("follows", "shared", "caches"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_an_nvrx_that_does_not_notice_moved_tensors_caches_none_of_the_gpu(
    ranks: RankPool, follows: bool, shared: bool, caches: bool
) -> None:
    first, second = ranks.run(caching_on_rank, follows, shared)

    assert first[0] == second[0] == [caches, caches]
    assert len(first[1]) == (0 if caches else 1) and second[1] == []
    assert caches or "the writer gets every tensor in each save" in first[1][0]


def sent_on_rank(directory: str, follows: bool) -> bool:
    """Whether what a request holds changes with the trainer's tensors."""
    with pytest.MonkeyPatch.context() as patch:
        if not follows:
            patch.delattr(filesystem_async, "_compute_tensor_data_ptrs", raising=False)
        state_dict = state(1)
        request = Job(directory=directory, create=f"{directory}/prepared").strategy().async_save(state_dict, directory)
        before = {bucket[1]: [each.clone() for _, each in bucket[2][1]] for bucket in request.preload_fn()}
        for entry in state_dict["model"].values():
            entry.data.fill_(7)
        after = {bucket[1]: [each for _, each in bucket[2][1]] for bucket in request.preload_fn()}
        return any(
            not left.equal(right) for name in before for left, right in zip(before[name], after[name], strict=True)
        )


def test_no_nvrx_is_sent_memory_that_the_trainer_goes_on_changing(ranks: RankPool, tmp_path: Path) -> None:
    for follows in (True, False):
        assert ranks.run(sent_on_rank, str(tmp_path), follows) == [False, False]


def test_a_megatron_whose_fsdp_dtensor_has_moved_saves_that_format_stock_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpointing, "preprocess_fsdp_dtensor_state_dict", moved_save_checkpoint)
    args = Namespace(ckpt_format="fsdp_dtensor", async_save=True, save="somewhere", yaml_cfg=None)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)

    installation = Installation()
    try:
        assert "megatron.training.checkpointing.get_save_and_finalize_callbacks" not in installation.hooks
        assert "megatron.training.checkpointing.TorchDistSaveShardedStrategy" in installation.hooks
        with caplog.at_level("WARNING", megatron_lm.__name__):
            installation._starting(lambda: None)()
        assert installation.session is None
        (warning,) = caplog.messages
        assert "saves are stock: megatron-core" in warning and "has no state (checkpointing." in warning
        args.ckpt_format = "torch_dist"
        assert installation._stock_reason(args) is None
    finally:
        installation.close()


def test_a_module_that_is_gone_is_a_place_that_is_not_there() -> None:
    assert not Site("no_such_module", "name", "user").is_there()
    assert not Site("arguments", "add_megatron_arguments", "no_such_user").is_there()


def test_without_a_place_for_flags_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.training import arguments

    monkeypatch.delattr(arguments, "add_megatron_arguments")
    with caplog.at_level("WARNING", megatron_lm.__name__):
        installation = megatron_lm.install()
    installation.close()

    assert installation.hooks == ()
    assert len(caplog.messages) == 1 and "has no flags (arguments.add_megatron_arguments" in caplog.messages[0]
