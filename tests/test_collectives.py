"""The collective counter against the process groups' own sequence numbers, and its promises to the code it watches.

With gloo an all_reduce or a barrier advances a group's sequence number by one, gather_object and all_gather_object by
two. The names below are bound when a rank imports this module, long before a counter starts.
"""

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import RankPool
from torch.distributed import (
    ProcessGroup,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

from megatron_ckpt_ext.collectives import NO_PHASE, CollectiveCounter, CollectiveSums, is_object_collective
from megatron_ckpt_ext.compat.c10d import OBJECT_COLLECTIVES, PRIMITIVES, Tap

NOT_COMMUNICATING = {
    "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "BackendType",
    "abort", "bound_device_id", "boxed", "get_backend", "get_group_store", "get_reconfigure_handle",
    "group_desc", "group_name", "merge_remote_group", "name", "new_window", "rank", "reconfigure",
    "register_abort_hook", "register_post_hook", "register_pre_hook", "set_timeout", "shutdown",
    "size", "split_group",
    "supports_reconfigure", "supports_window", "unbox", "unregister_abort_hook", "unregister_post_hook",
    "unregister_pre_hook", "use_pg_for_symm_mem_rendezvous",
}  # fmt: skip


def _world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _new_group(ranks: list[int]) -> ProcessGroup:
    group = dist.new_group(ranks)
    assert isinstance(group, ProcessGroup)
    return group


def _sequence(group: Any) -> int:
    return int(group._get_sequence_number_for_group())


def _all_gather_object(group: ProcessGroup | None = None, value: object = "x") -> None:
    gathered: list[object] = [None, None]
    all_gather_object(gathered, value, group=group)


def _gather_object(group: ProcessGroup | None) -> None:
    gathered: list[object] = [None, None]
    gather_object("x", gathered if dist.get_rank() == 0 else None, dst=0, group=group)


def _exchange_objects(group: ProcessGroup | None) -> None:
    if dist.get_rank() == 0:
        send_object_list(["x"], dst=1, group=group)
    else:
        recv_object_list([None], src=0, group=group)


def _pair_at_root() -> list[torch.Tensor] | None:
    return [torch.ones(1), torch.ones(1)] if dist.get_rank() == 0 else None


ACTIONS: dict[str, Callable[[ProcessGroup | None], Any]] = {
    "all_reduce": lambda group: all_reduce(torch.ones(1), group=group),
    "barrier": lambda group: barrier(group=group),
    "broadcast": lambda group: broadcast(torch.ones(1), src=0, group=group),
    "reduce": lambda group: dist.reduce(torch.ones(1), dst=0, group=group),
    "all_gather": lambda group: dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1), group=group),
    "gather": lambda group: dist.gather(torch.ones(1), _pair_at_root(), dst=0, group=group),
    "scatter": lambda group: dist.scatter(torch.ones(1), _pair_at_root(), src=0, group=group),
    "all_to_all_single": lambda group: dist.all_to_all_single(torch.ones(2), torch.ones(2), group=group),
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": lambda group: broadcast_object_list(["x"], src=0, group=group),
    "scatter_object_list": lambda group: scatter_object_list([None], ["x", "y"], src=0, group=group),
    "send_object_list": _exchange_objects,
}


def _count_each(second_group: bool, repeat: int) -> dict[str, tuple[dict[str, int], dict[str, int], int]]:
    """Per action: what was counted, the primitives among it, and how far the sequence number moved."""
    group = _new_group([0, 1]) if second_group else _world()
    found = {}
    with CollectiveCounter() as counter:
        for name, action in ACTIONS.items():
            before = _sequence(group)
            with counter.phase(name) as tally:
                for _ in range(repeat):
                    action(group)
            found[name] = (tally.counts, tally.primitives, _sequence(group) - before)
    return found


def _count_on_a_thread() -> tuple[dict[str, dict[str, int]], int]:
    before = _sequence(_world())
    with CollectiveCounter() as counter:
        with counter.phase("plan"):
            _on_thread(_all_gather_object)

            def write() -> None:
                with counter.phase("write"):
                    all_reduce(torch.ones(1))

            _on_thread(write)
            barrier()
        return counter.totals(), _sequence(_world()) - before


def _on_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _two_threads_at_once(repeat: int) -> dict[str, dict[str, int]]:
    groups = [_new_group([0, 1]) for _ in range(2)]
    with CollectiveCounter() as counter:

        def work(index: int) -> None:
            with counter.phase(str(index)):
                for _ in range(repeat):
                    _all_gather_object(groups[index])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return counter.totals()


def _nest() -> tuple[dict[str, int], dict[str, int], dict[str, dict[str, int]]]:
    with CollectiveCounter() as counter:
        with counter.phase("commit") as outer:
            barrier()
            with counter.phase("rebuild") as inner:
                _all_gather_object()
            all_reduce(torch.ones(1))
        with counter.phase("commit"):
            barrier()
        barrier()
        return outer.counts, inner.counts, counter.totals()


def _count_native() -> dict[str, dict[str, int]]:
    with CollectiveCounter() as counter:
        late = _new_group([0, 1])
        with counter.phase("functional"):
            functional.all_reduce(torch.ones(1), "sum", _world()).sum()
        with counter.phase("late group"):
            functional.all_reduce(torch.ones(1), "sum", late).sum()
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        with counter.phase("ddp"):
            model(torch.ones(1, 2)).sum().backward()
        return counter.totals()


def _save_with_dcp(directory: str) -> tuple[dict[str, int], int]:
    before = _sequence(_world())
    with CollectiveCounter() as counter:
        with counter.phase("save") as tally:
            save({"weight": torch.ones(4)}, checkpoint_id=directory)
        return tally.primitives, _sequence(_world()) - before


def _hook_groups_that_end() -> tuple[bool, dict[str, dict[str, int]]]:
    with CollectiveCounter() as counter:
        group = _new_group([0, 1])
        with counter.phase("first"):
            functional.all_reduce(torch.ones(1), "sum", group).sum()
        alive = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        with counter.phase("second"):
            functional.all_reduce(torch.ones(1), "sum", _world()).sum()
        return alive() is None, counter.totals()


def _fail_twice_at_the_first_primitive() -> dict[str, dict[str, int]]:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
    assert isinstance(group, ProcessGroup)
    with CollectiveCounter() as counter:
        for _ in range(2 if dist.get_rank() == 0 else 0):
            with contextlib.suppress(RuntimeError):
                _all_gather_object(group)
        return counter.totals()


def _python_functions_in(work: Callable[[], object]) -> set[str]:
    names: set[str] = set()
    sys.setprofile(lambda frame, event, argument: names.add(frame.f_code.co_name))
    work()
    sys.setprofile(None)
    return names


def _leave_hooks() -> list[bool]:
    def reduce() -> None:
        functional.all_reduce(torch.ones(1), "sum", _world()).sum()

    with CollectiveCounter():
        during = _python_functions_in(reduce)
    return [Tap._on_hook.__name__ in names for names in (during, _python_functions_in(reduce))]


def _two_counters() -> tuple[list[dict[str, dict[str, int]]], bool]:
    untouched = dict(vars(ProcessGroup))
    first, second = CollectiveCounter(), CollectiveCounter()
    first.start()
    first.start()
    barrier()
    second.start()
    barrier()
    first.close()
    barrier()
    second.close()
    second.close()
    barrier()
    first.start()
    barrier()
    first.close()
    functional.all_reduce(torch.ones(1), "sum", _world()).sum()
    return [first.totals(), second.totals()], dict(vars(ProcessGroup)) == untouched


def _count_around_failures() -> dict[str, dict[str, int]]:
    with CollectiveCounter() as counter:
        for value in (lambda: None, "x"):
            with counter.phase("save"):
                try:
                    _all_gather_object(value=value)
                except Exception as error:
                    assert "pickle" in str(error)
        return counter.totals()


def _count_as_no_member() -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
    group = dist.new_group([0])
    with CollectiveCounter() as counter:
        all_gather_object([""], "x", group=group)  # type: ignore[arg-type]  # a stranger's group is a number
        return counter.totals(), counter.primitives()


def test_each_call_is_counted_by_its_name_and_agrees_with_the_sequence_number(ranks: RankPool) -> None:
    for second_group in (False, True):
        for rank, found in enumerate(ranks.run(_count_each, second_group, 3)):
            for name, (counts, primitives, moved) in found.items():
                own = "recv_object_list" if name == "send_object_list" and rank == 1 else name
                assert counts == {own: 3}
                assert moved == sum(primitives.values())
            assert found["all_reduce"][2] == found["barrier"][2] == 3
            assert found["gather_object"][2] == found["all_gather_object"][2] == 6
            assert found["all_gather_object"][1] == {"all_gather": 6}
            assert found["send_object_list"][1] == ({"send": 6} if rank == 0 else {"recv": 6})


def test_another_thread_counts_as_other_unless_it_names_its_phase(ranks: RankPool) -> None:
    for totals, moved in ranks.run(_count_on_a_thread):
        assert totals == {NO_PHASE: {"all_gather_object": 1}, "write": {"all_reduce": 1}, "plan": {"barrier": 1}}
        assert moved == 4


def test_threads_at_once_do_not_disturb_each_other(ranks: RankPool) -> None:
    for totals in ranks.run(_two_threads_at_once, 20):
        assert totals == {"0": {"all_gather_object": 20}, "1": {"all_gather_object": 20}}


def test_the_inner_phase_counts_and_a_repeated_phase_adds_up(ranks: RankPool) -> None:
    for outer, inner, totals in ranks.run(_nest):
        assert outer == {"barrier": 1, "all_reduce": 1}
        assert inner == {"all_gather_object": 1}
        assert totals == {"commit": {"barrier": 2, "all_reduce": 1}, "rebuild": inner, NO_PHASE: {"barrier": 1}}


def test_calls_that_cpp_issues_are_counted(ranks: RankPool) -> None:
    for totals in ranks.run(_count_native):
        assert totals["functional"] == {"all_reduce": 1}
        assert totals["late group"] == {"all_reduce": 1}
        assert totals["ddp"] == {"all_reduce": 1}


def test_counters_overlap_and_the_last_to_leave_restores_torch(ranks: RankPool) -> None:
    for totals, restored in ranks.run(_two_counters):
        assert totals == [{NO_PHASE: {"barrier": 3}}, {NO_PHASE: {"barrier": 2}}]
        assert restored


def test_no_hook_outlives_the_counter(ranks: RankPool) -> None:
    assert ranks.run(_leave_hooks) == [[True, False]] * 2


def test_runs_that_fail_at_once_are_counted_apart(ranks: RankPool) -> None:
    alone, _ = ranks.run(_fail_twice_at_the_first_primitive)
    assert alone == {NO_PHASE: {"all_gather_object": 2}}


def test_a_whole_checkpoint_save_agrees_with_the_sequence_number(ranks: RankPool, tmp_path: Path) -> None:
    for primitives, moved in ranks.run(_save_with_dcp, str(tmp_path / "checkpoint")):
        assert moved == sum(primitives.values()) > 4


def test_a_counter_does_not_keep_a_group_alive(ranks: RankPool) -> None:
    counted = {"first": {"all_reduce": 1}, "second": {"all_reduce": 1}}
    assert ranks.run(_hook_groups_that_end) == [(True, counted)] * 2


def test_a_call_that_never_communicated_is_not_counted(ranks: RankPool) -> None:
    assert ranks.run(_count_around_failures) == [{"save": {"all_gather_object": 1}}] * 2
    member, stranger = ranks.run(_count_as_no_member)
    assert member == ({NO_PHASE: {"all_gather_object": 1}}, {NO_PHASE: {"all_gather": 2}})
    assert stranger == ({}, {})


def test_a_counter_that_was_not_started_touches_nothing() -> None:
    untouched = dict(vars(ProcessGroup))
    counter = CollectiveCounter()
    with counter.phase("plan") as tally:
        assert dict(vars(ProcessGroup)) == untouched
    counter.close()
    assert (tally.counts, counter.totals()) == ({}, {})


def test_every_method_of_a_process_group_is_known() -> None:
    public = {name for name in vars(ProcessGroup) if not name.startswith("_")}
    assert public - set(PRIMITIVES) - NOT_COMMUNICATING == set(), "torch has new methods: do they communicate?"
    for name in OBJECT_COLLECTIVES:
        assert callable(getattr(dist, name))


def test_sums_count_an_object_collective_once() -> None:
    sums = CollectiveSums.of({"all_gather_object": 2, "barrier": 1}, {"gather_object": 1, "all_reduce": 4})
    assert sums == CollectiveSums(objects=3, others=5)
    assert is_object_collective("send_object_list")
    assert not is_object_collective("all_gather")


def test_reading_counts_and_events_needs_no_torch() -> None:
    code = "import sys, megatron_ckpt_ext.collectives, megatron_ckpt_ext.events; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
