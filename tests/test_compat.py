"""Foreign names that ``compat`` relies on: one test fails when one of them moves or changes its meaning.

Elsewhere: ``compat.megatron_training`` in ``test_compat_training.py``, ``compat.c10d`` in ``test_collectives.py``,
``compat.emulated`` in ``test_emulation.py``, ``compat.megatron_wheel`` in ``test_launcher.py``, Megatron's arguments in
``test_fingerprint.py``, the number and order of finalizers and collectives in ``test_save_collectives.py``.
"""

import inspect
import io
import pickle
import queue
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, utils
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async
from ranks import RankPool
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType
from workload import Job, StateDict, save, state

from megatron_ckpt_ext.commit.results import retrieve_results
from megatron_ckpt_ext.compat import dcp, mcore, nvrx
from megatron_ckpt_ext.emulation import CpuEmulation
from megatron_ckpt_ext.metadata.items import describe_metadata
from megatron_ckpt_ext.metadata.layout import Item
from megatron_ckpt_ext.metadata.pickled import load_metadata
from megatron_ckpt_ext.plan.async_plan import save_state_dict_async_plan
from megatron_ckpt_ext.plan.held import held_in_sharded_state_dict
from megatron_ckpt_ext.replacements import Replacements
from megatron_ckpt_ext.strategy.torch_dist import PreparedSaveStrategy

# compat.dcp


def test_the_metadata_file_is_torchs() -> None:
    assert dcp.METADATA_FILE == filesystem._metadata_fn


@pytest.mark.parametrize("name", sorted(dcp.METADATA_GLOBALS | dcp.PLAN_GLOBALS), ids=".".join)
def test_every_allowed_name_exists(name: tuple[str, str]) -> None:
    module, attribute = name
    if module == "pathlib._local":
        pytest.skip("where Python 3.13 keeps it; it is in pathlib before and after")
    assert hasattr(import_module(module), attribute)


def test_a_wrapper_without_a_job_is_its_own_coordinator() -> None:
    wrapper = dcp.DistWrapper(None, False, 0)

    assert (wrapper.rank, wrapper.is_coordinator, wrapper.coordinator_rank) == (0, True, 0)
    assert (wrapper.group, wrapper.use_dist, wrapper.get_world_size()) == (None, False, 1)
    assert wrapper.gather_object("x") == wrapper.all_gather_object("x") == [wrapper.broadcast_object("x")]


class Recorder(pickle.Unpickler):
    """Loads anything of this test's own files and keeps the names it needed."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.names: set[tuple[str, str]] = set()

    def find_class(self, module_name: str, global_name: str) -> Any:
        found = super().find_class(module_name, global_name)
        if not isinstance(found, torch.dtype):
            self.names.add((module_name, global_name))
        return found


def names_in(file: Path) -> set[tuple[str, str]]:
    recorder = Recorder(file.read_bytes())
    assert isinstance(recorder.load(), Metadata)
    return recorder.names


# compat.mcore


def stock_and_ours_on_rank(directory: str, workers: int) -> None:
    """Save the same state dict with the stock strategy, asynchronously and not, and with ours that creates."""
    stock = mcore.TorchDistSaveShardedStrategy(thread_count=workers)
    ours = Job(directory=directory, workers=workers, create=f"{directory}/prepared.metadata").strategy()
    synchronous = Job(directory=directory, create=f"{directory}/never.metadata").strategy()
    with CpuEmulation(megatron=False):
        save(stock, f"{directory}/stock", state(1))
        save(ours, f"{directory}/ours", state(1))
        Path(f"{directory}/synchronous").mkdir(exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(state(1), f"{directory}/synchronous", synchronous)


@pytest.fixture(scope="module", params=[1, 2], ids=["one_worker", "two_workers"])
def both(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A directory with checkpoints of one state dict: ``stock``, ``ours``, ``synchronous``."""
    directory = tmp_path_factory.mktemp("both")
    ranks.run(stock_and_ours_on_rank, str(directory), request.param)
    return directory


def order_by_file(directory: Path) -> dict[str, list[Item]]:
    """Items in the order in which they lie in each file; lengths differ, since ours have slots."""
    storage = FileSystemReader(directory).read_metadata().storage_data
    order: dict[str, list[Item]] = {}
    for index, info in sorted(storage.items(), key=lambda pair: (pair[1].relative_path, pair[1].offset)):
        order.setdefault(info.relative_path, []).append(Item(index.fqn, index.offset and tuple(index.offset)))
    return order


def test_a_created_save_is_planned_like_the_stock_one(both: Path) -> None:
    stock, ours = (FileSystemReader(both / name).read_metadata() for name in ("stock", "ours"))

    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert order_by_file(both / "ours") == order_by_file(both / "stock")


def test_a_synchronous_save_is_the_stock_one(both: Path) -> None:
    assert (both / "synchronous" / "metadata.json").exists()
    assert not (both / "never.metadata").exists()
    stock, ours = (FileSystemReader(both / name).read_metadata() for name in ("stock", "synchronous"))
    assert ours.state_dict_metadata == stock.state_dict_metadata


def test_the_allow_list_is_what_metadata_files_need(both: Path) -> None:
    assert names_in(both / "ours" / ".metadata") <= dcp.METADATA_GLOBALS
    plans = names_in(both / "stock" / ".metadata") - dcp.METADATA_GLOBALS
    assert {name for _, name in plans} >= {"SavePlan", "WriteItem"}
    assert plans <= dcp.PLAN_GLOBALS
    for name in ("ours", "stock"):
        assert load_metadata((both / name / ".metadata").read_bytes(), origin=name).storage_data


def shards(rank: int, world: int) -> StateDict:
    """Every kind of shard: prepended axes, many a key, uneven cuts, scalars, nothing at all, objects in a grid."""
    return {
        "stacked": ShardedTensor.from_rank_offsets(
            "stacked", torch.ones(3, 2), (0, rank, world), (2, 0, 1), prepend_axis_num=1
        ),
        "several": [
            ShardedTensor.from_rank_offsets("several", torch.ones(2, 3), (0, world * part + rank, 2 * world))
            for part in range(2)
        ],
        "uneven": ShardedTensor(
            "uneven",
            torch.ones(2 + rank),
            torch.float32,
            (2 + rank,),
            (sum(2 + other for other in range(world)),),
            (sum(2 + other for other in range(rank)),),
            None,
        ),
        "scalar": ShardedTensor.from_rank_offsets("scalar", torch.tensor(1.0), replica_id=rank),
        "half": ShardedTensor.from_rank_offsets("half", torch.ones(2, dtype=torch.bfloat16), replica_id=rank),
        "grid": ShardedObject("grid", {"rank": rank}, (1, world), (0, rank)),
        "shared": ShardedObject("shared", [], (1,), (0,), replica_id=(0, rank)),
    }


def held_and_described_on_rank(directory: str) -> tuple[dict[Item, str], dict[Item, str]]:
    held = held_in_sharded_state_dict(shards(dist.get_rank(), dist.get_world_size()))
    strategy = Job(directory=directory, create=f"{directory}/prepared.metadata").strategy()
    save(strategy, f"{directory}/created", shards(dist.get_rank(), dist.get_world_size()))
    dist.barrier()
    return held, describe_metadata(FileSystemReader(f"{directory}/created").read_metadata())


def test_a_state_dict_and_its_metadata_are_described_alike(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(held_and_described_on_rank, str(tmp_path))

    described = found[0][1]
    held = {item: text for each, _ in found for item, text in each.items()}
    assert held == {item: text for item, text in described.items() if item.fqn != "common_state/shard_0_1"}
    assert held[Item("stacked", (1, 0, 0))] == "float32 1x3x2 of 2x3x2"
    assert held[Item("uneven", (2,))] == "float32 3 of 5"
    assert held[Item("scalar", ())] == "float32 scalar of scalar"
    assert held[Item("half", (0,))] == "bfloat16 2 of 2"


def translate_on_rank() -> tuple[dict[str, str], dict[str, str]]:
    """Types by key, with only main replicas and with all of them."""
    translated = (mcore.to_pyt_state_dict(state(1), keep_only_main_replica=only) for only in (True, False))
    main, every = ({key: type(value).__name__ for key, value in each.items()} for each in translated)
    return main, every


def test_only_main_replicas_are_translated(ranks: RankPool) -> None:
    (main, every), (other_main, other_every) = ranks.run(translate_on_rank)

    replicated = {"model.bias", "model.norm", "settings/shard_0_1"}
    assert replicated <= main.keys()
    assert other_every.keys() - other_main.keys() == replicated
    assert main == every
    assert every["settings/shard_0_1"] == io.BytesIO.__name__


def test_the_planner_plans_locally_and_leaves_the_state_dict_flat() -> None:
    planner = mcore.save_planner(keep_only_main_replica=True)

    assert planner.can_run_decentralized_global_plan
    assert not planner.flatten_state_dict
    assert not planner.flatten_sharded_tensors


def test_our_strategy_is_called_like_the_stock_one() -> None:
    stock, ours = mcore.TorchDistSaveShardedStrategy, PreparedSaveStrategy

    assert {"args", "kwargs"} <= inspect.signature(ours).parameters.keys()
    known = {"backend", "version", "keep_only_main_replica", "thread_count", "cached_metadata", "separation_hint"}
    since_0_18 = inspect.signature(stock).parameters.keys() & {"cpu_shm_mode"}
    assert set(inspect.signature(stock).parameters) == known | since_0_18
    assert mcore.uses_shared_memory(stock(**dict.fromkeys(since_0_18, True))) is bool(since_0_18)
    assert list(inspect.signature(ours.async_save).parameters) == list(inspect.signature(stock.async_save).parameters)
    attributes = {"backend", "keep_only_main_replica", "separation_hint", "thread_count", *since_0_18}
    assert attributes | {"use_cached_ckpt_structure"} <= vars(stock()).keys()


def finalizers_on_rank(directory: str) -> list[tuple[str, bool, bool]]:
    """Type of each finalizer, and what we take it for."""
    strategy = Job(directory=directory, create=f"{directory}/prepared.metadata").strategy()
    request = dist_checkpointing.save(
        {"weight": torch.ones(1)}, directory, strategy, async_sharded_save=True, verify_integrity=True
    )
    return [
        (type(each).__name__, mcore.writes_metadata_json(each), mcore.is_collective_finalizer(each))
        for each in request.finalize_fns
    ]


def test_finalizers_are_what_we_take_them_for(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(finalizers_on_rank, str(tmp_path), world_size=1)

    assert found == [("SaveCommit", False, False), ("function", True, False), ("function", False, True)]


def test_the_side_file_is_megatrons(both: Path) -> None:
    strategy = mcore.TorchDistSaveShardedStrategy()

    assert (
        mcore.metadata_json(strategy.backend, strategy.version) == (both / "stock" / mcore.METADATA_JSON).read_bytes()
    )


def test_what_is_not_sharded_is_one_item_of_the_state_dict(both: Path) -> None:
    """Since 0.19; before, it is a file of its own, and what we take out of the state dict is what Megatron writes."""
    item = f"{mcore.COMMON_STATE}/shard_0_1"
    is_item = item in FileSystemReader(both / "stock").read_metadata().state_dict_metadata
    source = inspect.getsource(dist_checkpointing.save)
    tensor = ShardedTensor.from_rank_offsets("w", torch.ones(2))
    common = mcore.common_beside({"model": {"w": tensor}, "here": LocalNonpersistentObject(1), "step": 7})
    if common is None:
        assert is_item
        assert f'sharded_state_dict["{mcore.COMMON_STATE}"] = ShardedObject(' in source
    else:
        assert not is_item
        assert "save_common(state_dict, checkpoint_dir)" in source
        assert (both / "stock" / "common.pt").exists()
        assert common == {"step": 7}


def test_megatrons_save_takes_subclasses() -> None:
    parameters = inspect.signature(dist_checkpointing.save).parameters

    assert issubclass(PreparedSaveStrategy, mcore.TorchDistSaveShardedStrategy)
    used = {"sharded_strategy", "validate_access_integrity", "async_sharded_save", "async_strategy"}
    assert used | {"preprocess_common_before_consistancy_check"} <= parameters.keys()
    assert parameters["async_strategy"].default == "nvrx"


# compat.nvrx


def test_a_request_has_the_fields_we_fill() -> None:
    fields = ("async_fn", "async_fn_args", "finalize_fns", "async_fn_kwargs", "preload_fn", "is_frozen", "call_idx")

    assert nvrx.AsyncRequest._fields == fields


def test_queues_that_joined_are_drained_before_shared_buffers_are_used_again() -> None:
    class Queue:
        drained = 0

        def maybe_finalize_async_calls(self, no_dist: bool) -> None:
            self.drained += no_dist

    queues = Queue(), Queue()
    for each in queues:
        nvrx.join_instances(each)
    nvrx.drain_before_reuse()

    drain = nvrx.FileSystemWriterAsync._shm_drain_callback
    assert drain is not None
    drain()

    assert [each.drained for each in queues] == [1, 1]
    assert "_shm_drain_callback()" in inspect.getsource(nvrx.FileSystemWriterAsync)


def versions_asked_on_rank() -> tuple[int, list[str]]:
    asked: list[str] = []
    real = utils.is_torch_min_version

    def asking(version: str) -> bool:
        asked.append(version)
        return bool(real(version))

    tensors = {f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", torch.ones(2)) for n in range(5)}
    with Replacements() as names:
        names.apply([(utils, "is_torch_min_version", asking)])
        found = mcore.to_pyt_state_dict(tensors, keep_only_main_replica=True)
        assert utils.is_torch_min_version is asking
    return len(found), asked


def test_torchs_version_is_parsed_once_for_all_tensors_of_a_save(ranks: RankPool) -> None:
    assert ranks.run(versions_asked_on_rank, world_size=1) == [(5, ["2.6a0"])]


def test_results_can_be_led_elsewhere() -> None:
    before, box = filesystem_async._results_queue, object()

    with nvrx.results_through(box):
        assert filesystem_async.get_write_results_queue() is box
    assert filesystem_async._results_queue is before


def test_what_was_sent_to_a_writer_can_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = nvrx.FileSystemWriterAsync
    caches = ["_shm_tensor_cache", "_cached_identifiers"]
    caches += ["_cached_tensor_data_ptrs"] if nvrx.follows_memory() else []
    for name in caches:
        sent: Any = {"sent": "tensor"}
        monkeypatch.setattr(writer, name, sent if isinstance(getattr(writer, name), dict) else set(sent))

    nvrx.forget_what_the_writer_has()

    assert [name for name in caches if getattr(writer, name)] == []


def test_a_writer_process_gets_its_priorities_by_name() -> None:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import _set_process_qos

    assert list(inspect.signature(_set_process_qos).parameters) == ["cpu_priority", "io_priority"]


class AbortedQueue:
    """A queue that is not of NVRx's class."""

    def __init__(self) -> None:
        self.aborted: list[bool] = []

    def close(self, abort: bool = False) -> None:
        self.aborted.append(abort)


def test_an_in_process_restart_finds_a_queue_that_joined() -> None:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import abort_nvrx_checkpoint

    queue = AbortedQueue()
    nvrx.join_instances(queue)

    abort_nvrx_checkpoint()

    assert queue.aborted == [True]


def writer_on_rank(directory: str) -> None:
    """What we read from a writer, before and after it is given data."""
    writer = nvrx.FileSystemWriterAsync(
        Path(directory),
        separation_hint=None,
        thread_count=1,
        use_cached_data_structure=False,
        use_cpu_shm_for_gpu_tensors=False,
    )
    assert writer.can_run_decentralized_global_plan
    assert str(writer.checkpoint_id) == directory
    assert writer.get_save_function_and_args() == (None, None, [])
    assert list(writer.retrieve_write_results()) == []
    assert str(writer.storage_meta().checkpoint_id) == directory
    state_dict = mcore.to_pyt_state_dict(state(1), keep_only_main_replica=True)
    save_state_dict_async_plan(state_dict, writer, planner=mcore.save_planner(keep_only_main_replica=True))
    items, streams = nvrx.non_tensor_items(writer)
    assert {item.type for item in items} == {WriteItemType.BYTE_IO}
    assert {item.index.fqn for item in items} == {"rng/shard_0_1", "settings/shard_0_1"}
    assert [torch.load(stream, weights_only=False) for stream in streams] == [
        [{"seed": 1, "rank": 0}],
        [{"lr": 0.25}],
    ]
    function, preload, arguments = nvrx.save_function(writer)
    assert callable(function)
    assert arguments[1] is None
    assert [bucket[1] for bucket in preload()] == ["__0_0.distcp"]


def test_a_writer_is_what_we_take_it_for(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(writer_on_rank, str(tmp_path), world_size=1)


def test_a_missing_result_is_a_failure_in_one_sentence(tmp_path: Path) -> None:
    writer = nvrx.FileSystemWriterAsync(tmp_path)
    writer.results_queue = queue.Queue()
    assert dcp.is_wrapped_exception(writer.retrieve_write_results())

    assert retrieve_results(writer) == ([], "results_queue should not be empty")

    writer.results_queue.put(OSError("disk full"))
    assert retrieve_results(writer) == ([], "Worker failure: disk full")
