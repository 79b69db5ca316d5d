"""Staging of GPU state: a stream beside the training, events, page-locked memory, and no context where none belongs."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch
from staged_states import KINDS, Scaled, State, differences, every_kind, reference, spoil

from megatron_ckpt_ext.staging.stage import HostStager, Staged

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: copies from one are under test"),
    pytest.mark.filterwarnings("ignore:Sparse CSR"),
]

ROOT = Path(__file__).resolve().parents[1]
GPU = torch.device("cuda", 0)
SLEEP_SECONDS = 1.0
MEGABYTES_64 = 1 << 24
"""Float32 elements: long enough a copy to be seen."""


@pytest.fixture
def stager() -> Iterator[HostStager]:
    stager = HostStager()
    yield stager
    torch.cuda.synchronize()
    stager.close()


def keep_busy(seconds: float = SLEEP_SECONDS) -> None:
    """Give the current stream something that lasts at least so long: no GPU clock reaches 3 GHz."""
    torch.cuda._sleep(int(seconds * 3e9))  # type: ignore[no-untyped-call]  # torch


def warm(stager: HostStager, state: State) -> None:
    """Save once: buffers are allocated and locked, streams are made."""
    staged = stager.stage(state)
    staged.wait()
    staged.release()
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_what_was_there_though_overwritten_behind_the_fence(kind: str, stager: HostStager) -> None:
    state = KINDS[kind](GPU)
    for _ in range(2):
        expected = reference(state)
        staged = stager.stage(state)
        staged.fence()
        spoil(state)
        staged.wait()
        assert differences(staged.state, expected) == []
        staged.release()


def test_the_copy_comes_behind_what_was_queued_and_nobody_waits(stager: HostStager) -> None:
    state = {"a": torch.zeros(MEGABYTES_64, device=GPU), "scalar": torch.zeros((), device=GPU)}
    warm(stager, state)

    begin = time.monotonic()
    keep_busy()
    state["a"].fill_(1)
    state["scalar"].fill_(1)
    staged = stager.stage(state)
    staged.fence()
    spoil(state)
    seconds = time.monotonic() - begin
    busy = not torch.cuda.current_stream().query()
    staged.wait()

    assert busy
    assert seconds < SLEEP_SECONDS / 2
    assert bool((staged.state["a"] == 1).all())
    assert staged.state["scalar"] == 1


def test_the_copy_overlaps_what_is_queued_behind_it(stager: HostStager) -> None:
    state = {"a": torch.ones(MEGABYTES_64, device=GPU)}
    warm(stager, state)

    staged = stager.stage(state)
    keep_busy()
    staged.wait()

    assert not torch.cuda.current_stream().query(), "the copy has waited for the training behind it"
    assert bool((staged.state["a"] == 1).all())


def test_the_fence_holds_the_stream_of_the_caller_until_the_copies_are_there(stager: HostStager) -> None:
    state = {"a": torch.ones(MEGABYTES_64, device=GPU)}
    warm(stager, state)
    keep_busy()
    staged = stager.stage(state)
    optimizer = torch.cuda.Stream(GPU)  # type: ignore[no-untyped-call]  # torch
    with torch.cuda.stream(optimizer):
        before = not optimizer.query()
        staged.fence()
        after = not optimizer.query()

    assert (before, after) == (False, True)
    optimizer.synchronize()
    assert bool((staged.state["a"] == 1).all())


def test_sources_live_until_they_are_copied(stager: HostStager) -> None:
    warm(stager, {"a": torch.ones(MEGABYTES_64, device=GPU)})
    state = {"a": torch.ones(MEGABYTES_64, device=GPU)}
    keep_busy()
    staged = stager.stage(state)
    del state
    # The allocator would give the memory out again at once, and this stream would fill it while the other one copies.
    others = [torch.zeros(MEGABYTES_64, device=GPU) for _ in range(4)]
    staged.wait()

    assert bool((staged.state["a"] == 1).all())
    assert not any(bool(each.any()) for each in others)


def test_sources_are_dropped_when_they_are_copied(stager: HostStager) -> None:
    before = torch.cuda.memory_allocated()
    staged = stager.stage({"a": torch.ones(MEGABYTES_64, device=GPU)})
    assert torch.cuda.memory_allocated() > before
    staged.wait()
    torch.cuda.synchronize()

    assert torch.cuda.memory_allocated() == before


def test_dequantized_values_exist_one_at_a_time(stager: HostStager) -> None:
    codes = torch.ones(MEGABYTES_64, dtype=torch.uint8, device=GPU)
    state = {str(index): Scaled(codes, 0.5) for index in range(6)}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stager.stage(state).wait()

    # codes.float() and its product with the scale.
    assert torch.cuda.max_memory_allocated() - before <= 2 * 4 * MEGABYTES_64


def test_buffers_are_page_locked_and_the_same_in_every_save(stager: HostStager) -> None:
    state = {"large": torch.ones(1 << 20, device=GPU), "scalar": torch.ones((), device=GPU), "host": torch.ones(3)}
    addresses = []
    for _ in range(3):
        staged = stager.stage(state)
        staged.wait()
        copies = dict(staged.state)
        addresses.append([copies[key].data_ptr() for key in state])
        assert [copies[key].is_pinned() for key in state] == [True, True, False]
        staged.release()
    stager.close()

    assert addresses[0] == addresses[1] == addresses[2]
    assert not copies["large"].is_pinned()
    assert not copies["scalar"].is_pinned()


def test_a_tensor_that_moves_to_the_gpu_gets_other_memory(stager: HostStager) -> None:
    warm(stager, {"a": torch.ones(3)})
    staged = stager.stage({"a": torch.full((3,), 2.0, device=GPU)})
    staged.wait()

    assert staged.state["a"].tolist() == [2, 2, 2]
    assert staged.state["a"].is_pinned()


def test_a_thread_may_wait_while_the_trainer_goes_on(stager: HostStager) -> None:
    state = every_kind(GPU)
    expected = reference(state)
    found: list[list[str]] = []

    def write(staged: Staged) -> None:
        staged.wait()
        found.append(differences(staged.state, expected))

    keep_busy()
    staged = stager.stage(state)
    writer = Thread(target=write, args=(staged,))
    writer.start()
    staged.fence()
    spoil(state)
    writer.join(timeout=60)

    assert found == [[]]


def run_alone(script: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_state_on_the_host_needs_no_cuda() -> None:
    run_alone("""
        import torch
        from megatron_ckpt_ext.staging.stage import HostStager
        stager = HostStager()
        staged = stager.stage({"a": torch.ones(3), "b": [{1, 2}]})
        staged.fence(); staged.wait(); staged.release(); stager.close()
        assert torch.cuda.is_available() and not torch.cuda.is_initialized()
    """)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a context on the other one would be seen")
def test_no_context_on_other_devices() -> None:
    run_alone("""
        import threading, torch
        from megatron_ckpt_ext.staging.stage import HostStager
        stager = HostStager()
        state = {"a": torch.ones(1 << 20, device="cuda:1"), "b": torch.ones((), device="cuda:1")}
        assert not torch._C._cuda_hasPrimaryContext(0), "torch itself makes one"
        staged = stager.stage(state)
        staged.fence()
        writer = threading.Thread(target=staged.wait)
        writer.start()
        writer.join(60)
        staged.release()
        stager.close()
        assert torch.cuda.current_device() == 0
        assert torch._C._cuda_hasPrimaryContext(1) and not torch._C._cuda_hasPrimaryContext(0)
    """)
