"""Staging on the CPU: what is copied, into which memory, and what is refused."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from staged_states import KINDS, Scaled, State, differences, every_kind, reference, stage_twice

from megatron_ckpt_ext.staging.errors import NoRoomError, StagingError
from megatron_ckpt_ext.staging.memory import PlainMemory
from megatron_ckpt_ext.staging.stage import HostStager

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")


class CountedMemory(PlainMemory):
    """Plain memory that counts."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.live: dict[int, int] = {}

    def allocate(self, nbytes: int) -> torch.Tensor:
        tensor = super().allocate(nbytes)
        self.allocated.append(nbytes)
        self.live[tensor.data_ptr()] = nbytes
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        del self.live[tensor.data_ptr()]


@pytest.fixture
def memory() -> CountedMemory:
    return CountedMemory()


@pytest.fixture
def stager(memory: CountedMemory) -> Iterator[HostStager]:
    stager = HostStager(allocator=memory)
    yield stager
    stager.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_what_was_there_bit_for_bit(kind: str, stager: HostStager, memory: CountedMemory) -> None:
    state = KINDS[kind](CPU)

    assert stage_twice(stager, state) == []
    assert sum(memory.allocated) == sum(memory.live.values()) == stager.stage(state).bytes


def test_copies_are_contiguous_exact_and_outside_autograd(stager: HostStager) -> None:
    state = {
        **KINDS["view_of_a_larger"](CPU),
        "grown": KINDS["not_a_leaf"](CPU),
        "across": KINDS["non_contiguous"](CPU),
    }
    staged = stager.stage(state).state

    for copied in (staged["a"], staged["grown"]["a"], staged["across"]["a"], staged["across"]["b"]):
        assert type(copied) is torch.Tensor
        assert copied.is_contiguous()
        assert copied.untyped_storage().nbytes() == copied.nbytes, "the writer would make a copy of its own"
        assert not copied.requires_grad


def test_tied_tensors_have_one_buffer_until_they_part(stager: HostStager, memory: CountedMemory) -> None:
    state = KINDS["tied"](CPU)
    staged = stager.stage(state)
    assert (staged.bytes, staged.items) == (2 * 36, 3)
    assert staged.state["embedding"].data_ptr() == staged.state["head"]["weight"].data_ptr()
    staged.release()

    state["head"]["weight"] = state["embedding"] + 1
    assert stage_twice(stager, state) == []
    assert memory.allocated == [36, 36, 36]


def test_the_state_dict_is_read_anew(stager: HostStager) -> None:
    state = {"counter": KINDS["stateful"](CPU)["counter"]}
    stager.stage(state).release()

    state["counter"].tensor = torch.arange(5.0)

    assert stager.stage(state).state["counter"]["tensor"].tolist() == [0, 1, 2, 3, 4]


def test_only_objects_of_the_top_level_are_stateful(stager: HostStager) -> None:
    counter = KINDS["stateful"](CPU)["counter"]

    nested = stager.stage({"all": {"counter": counter}}).state["all"]["counter"]

    assert type(nested) is type(counter)
    assert torch.equal(nested.tensor, counter.tensor)


def test_tensors_of_the_host_are_not_held(stager: HostStager) -> None:
    state: State = {"a": torch.ones(3), "b": [torch.ones(3)], "c": Scaled(torch.ones(3, dtype=torch.uint8), 0.5)}
    tensors = [weakref.ref(state["a"]), weakref.ref(state["b"][0]), weakref.ref(state["c"])]
    staged = stager.stage(state)
    del state

    assert [tensor() for tensor in tensors] == [None] * 3
    assert staged.items == 3


def test_dequantized_values_exist_one_at_a_time(stager: HostStager) -> None:
    seen: list[str] = []

    class Watched(Scaled):
        def dequantize(self) -> torch.Tensor:
            values = super().dequantize()
            seen.append("made")
            weakref.finalize(values, seen.append, "gone")
            return values

    stager.stage({str(index): Watched(torch.ones(3, dtype=torch.uint8), 0.5) for index in range(3)})

    assert seen == ["made", "gone"] * 3


def test_a_dequantize_that_breaks_its_promise_is_refused(stager: HostStager) -> None:
    class Half(Scaled):
        def dequantize(self) -> torch.Tensor:
            return super().dequantize().half()

    with pytest.raises(StagingError, match=r"a\.b is a Half of torch.float32 .* returns a Tensor of torch.float16"):
        stager.stage({"a": {"b": Half(torch.ones(3, dtype=torch.uint8), 0.5)}})


def released_storage() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED = {
    "meta": (torch.ones(3, device="meta"), r"model\.0 is on the meta device.*materialize"),
    "released": (released_storage(), r"the memory of model\.0 is released.*bring it back"),
    "object_with_meta": ({1: {torch.ones(3, device="meta")}}, r"model\.0\.1, a set, cannot be copied.*meta"),
    "lock": (threading.Lock(), r"model\.0, a lock, cannot be copied"),
}


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_values_is_refused_with_its_key(value: object, message: str, stager: HostStager) -> None:
    with pytest.raises(StagingError, match=message):
        stager.stage({"model": [value]})
    stager.stage({"model": [torch.ones(3)]})


def test_the_mode_of_the_caller_does_not_matter(stager: HostStager) -> None:
    with torch.inference_mode(), torch.device("meta"):
        stager.stage({"a": torch.zeros(3, device="cpu")}).release()

    assert stager.stage({"a": torch.ones(3)}).state["a"].tolist() == [1, 1, 1]


def test_buffers_are_allocated_once(stager: HostStager, memory: CountedMemory) -> None:
    state = every_kind(CPU)
    staged = stager.stage(state)
    first = list(memory.allocated)
    for _ in range(9):
        staged.release()
        staged = stager.stage(state)

    assert memory.allocated == first
    assert sum(memory.live.values()) <= 1.1 * staged.bytes


def test_keys_come_go_and_change(stager: HostStager, memory: CountedMemory) -> None:
    def allocated_by(state: State) -> list[int]:
        memory.allocated.clear()
        expected = reference(state)
        staged = stager.stage(state)
        assert differences(staged.state, expected) == []
        staged.release()
        assert sum(memory.live.values()) == staged.bytes
        return memory.allocated

    stays = torch.randn(8)
    assert allocated_by({"stays": stays, "goes": torch.randn(2)}) == [32, 8]
    assert allocated_by({"stays": stays, "comes": torch.randn(3)}) == [12]
    assert allocated_by({"stays": stays, "comes": torch.randn(5)}) == [20]
    assert allocated_by({"stays": stays.view(2, 4), "comes": torch.arange(5, dtype=torch.int32)}) == [20]
    assert allocated_by({"comes": torch.empty(0, dtype=torch.int32)}) == []


def test_close_frees_all(stager: HostStager, memory: CountedMemory) -> None:
    staged = stager.stage({"a": torch.ones(3)})
    stager.close()
    stager.close()

    assert memory.live == {}
    assert staged.state["a"].tolist() == [1, 1, 1], "who still writes reads valid memory"
    with pytest.raises(RuntimeError, match="closed: make another"):
        stager.stage({"a": torch.ones(3)})


def test_buffers_that_are_read_are_not_written(stager: HostStager) -> None:
    staged = stager.stage({"a": torch.ones(3)})
    with pytest.raises(RuntimeError, match="not released: wait until it is written"):
        stager.stage({"a": torch.zeros(3)})
    assert staged.state["a"].tolist() == [1, 1, 1]

    staged.release()
    staged.release()
    assert staged.state == {}, "nobody reads buffers that are written again"
    assert stager.stage({"a": torch.zeros(3)}).state["a"].tolist() == [0, 0, 0]


class Witness:
    """Tells whether it was copied."""

    copied = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Witness":
        self.copied = True
        return self


@pytest.mark.parametrize(("limit", "free"), [(399, 10_000), (None, 399)], ids=["budget", "free_memory"])
def test_too_large_a_state_is_refused_before_anything_is_copied(
    limit: int | None, free: int, memory: CountedMemory
) -> None:
    witness = Witness()
    stager = HostStager(limit=limit, allocator=memory, free_memory=lambda: free)

    with pytest.raises(NoRoomError, match="takes 400 bytes") as caught:
        stager.stage({"a": torch.ones(60), "b": torch.ones(40), "object": witness})

    error = caught.value
    assert (error.needed, error.new, error.limit, error.free) == (400, 400, limit, free)
    assert str(399) in str(error)
    assert (memory.allocated, witness.copied) == ([], False)


def test_only_growth_needs_free_memory(memory: CountedMemory) -> None:
    free = [400]
    stager = HostStager(limit=408, allocator=memory, free_memory=free.pop)
    state = {"a": torch.ones(100)}
    stager.stage(state).release()
    stager.stage(state).release()
    assert free == [], "asked once"

    free.append(3)
    with pytest.raises(NoRoomError, match=r"takes 404 bytes of host memory, 4 of them .* 408 bytes, and 3 bytes are"):
        stager.stage({**state, "b": torch.ones(1)})
    assert memory.allocated == [400]

    free.append(4)
    stager.stage({**state, "b": torch.ones(1)}).release()
    assert memory.allocated == [400, 4]
