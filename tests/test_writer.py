"""The writer process: it answers for every call, copies before the trainer goes on, and never outlives its trainer.

Real processes. Each costs some seconds of imports, so tests that leave it intact share one.
"""

import operator
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from queue import Empty
from typing import Any, NoReturn

import pytest
import torch

from megatron_ckpt_ext.write.snapshot import check_room, pickle_snapshot
from megatron_ckpt_ext.write.worker import Call, ResultBox, WorkerSettings
from megatron_ckpt_ext.write.writer import CallState, Writer, _Ear

ROOT = Path(__file__).resolve().parents[1]
LONG = timedelta(seconds=60)
type Start = Callable[[timedelta], Writer]
SETTINGS = WorkerSettings(rank=0, cpu_priority=0)


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    made = Writer(SETTINGS, LONG)
    yield made
    made.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts writers for tests that break them."""
    writers: list[Writer] = []

    def start_one(timeout: timedelta) -> Writer:
        writers.append(Writer(SETTINGS, timeout))
        return writers[-1]

    yield start_one
    for each in writers:
        each.close(grace=timedelta(seconds=1))


def call(
    index: int, function: Callable[..., Any], *arguments: Any, preload: Callable[[], Any] | None = None, **options: Any
) -> Call:
    return Call(index=index, function=function, arguments=list(arguments), options=options, preload=preload)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def ended(writer: Writer, index: int) -> CallState:
    """Poll as a trainer does, until the call has ended."""
    while not (state := writer.poll(index)).ended:
        time.sleep(0.02)
    writer.forget(index)
    return state


# Functions that run in the writer.


def put(prefix: str, staged: Any, box: ResultBox, *, gate: Path | None = None) -> None:
    if gate is not None:
        wait_for(gate)
    box.put(f"{prefix}{staged}")
    box.put(ValueError("of a kind that only the writer knows"))


def store(path: Path, values: Any, gate: Path) -> None:
    wait_for(gate)
    torch.save(values, path)


def begin(begun: Path, never: Path) -> None:
    begun.touch()
    wait_for(never)


def fail(*_arguments: Any) -> NoReturn:
    raise LookupError("no such thing")


def leave(*_arguments: Any) -> None:
    os._exit(17)


def stop(*_arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)  # another thread may be the one that stops at once


def memory(path: Path) -> None:
    """Kilobytes of this process, shared memory included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    path.write_text(next(line.split()[1] for line in lines if line.startswith("VmRSS:")))


def nothing(*_arguments: Any) -> None:
    pass


class Unloadable:
    """Can be sent, and fails when it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (fail, ())


def test_what_the_function_leaves_comes_back_as_plain_data(writer: Writer) -> None:
    assert writer.submit(call(0, put, "got ", None, ResultBox(), preload=partial(str, "staged"))).staged

    state = ended(writer, 0)

    assert state.done
    assert state.failure is None
    text, error = pickle.loads(state.results)
    assert text == "got staged"
    assert type(error) is RuntimeError
    assert str(error) == "ValueError: of a kind that only the writer knows"


def test_a_call_is_staged_while_the_one_before_is_written(writer: Writer, tmp_path: Path) -> None:
    gates = [tmp_path / "first", tmp_path / "second"]

    for index, gate in enumerate(gates):
        assert writer.submit(call(index, put, "", None, ResultBox(), preload=partial(str, index), gate=gate)).staged
    assert not writer.poll(0).ended
    gates[1].touch()
    assert not writer.poll(1).ended  # written in order
    gates[0].touch()

    assert [pickle.loads(ended(writer, index).results)[0] for index in (0, 1)] == ["0", "1"]


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(6.0).reshape(2, 3),
    "parameter": lambda: torch.nn.Parameter(torch.arange(6.0)),
    "step": lambda: torch.tensor(7.0),
    "view": lambda: torch.arange(60.0).reshape(6, 10)[1:3, ::2],
    "bfloat16": lambda: torch.arange(6).to(torch.bfloat16),
    "empty": lambda: torch.empty(0, 3),
}


def test_tensors_changed_after_the_call_are_stored_as_they_were(writer: Writer, tmp_path: Path) -> None:
    live = {name: make() for name, make in TENSORS.items()}
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    gate = tmp_path / "gate"
    writer.submit(call(0, store, tmp_path / "stored", live, gate))

    with torch.no_grad():
        for tensor in live.values():
            tensor.add_(1.0)
    gate.touch()

    assert ended(writer, 0).done
    stored = torch.load(tmp_path / "stored")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {name: t.dtype for name, t in before.items()}
    assert [name for name, tensor in stored.items() if not torch.equal(tensor, before[name])] == []
    assert not any(tensor.is_shared() for tensor in live.values())  # type: ignore[no-untyped-call]


def test_what_is_in_shared_memory_already_is_not_copied(writer: Writer, tmp_path: Path) -> None:
    """NVRx's shared buffers are filled anew by the trainer and read by the writer, which knows them from before."""
    shared = torch.zeros(3).share_memory_()  # type: ignore[no-untyped-call]
    gate = tmp_path / "gate"
    writer.submit(call(0, store, tmp_path / "stored", shared, gate))

    shared.fill_(5.0)
    gate.touch()

    assert ended(writer, 0).done
    assert torch.load(tmp_path / "stored").tolist() == [5.0] * 3


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (call(0, fail), "writing failed: LookupError: no such thing"),
        (call(0, sys.exit, "told to"), "writing failed: SystemExit: told to"),
        (call(0, nothing, 0, 1, preload=fail), "staging failed: LookupError: no such thing"),
        (call(0, nothing, Unloadable()), "staging failed: LookupError: no such thing"),
    ],
    ids=["writing", "exit", "staging", "arriving"],
)
def test_a_call_that_raises_fails_and_the_writer_goes_on(writer: Writer, bad: Call, cause: str) -> None:
    writer.submit(bad)

    assert ended(writer, 0).failure == cause
    assert writer.usable
    writer.submit(call(1, nothing))
    assert ended(writer, 1).done


def test_a_call_that_cannot_be_sent_fails_at_once(writer: Writer) -> None:
    state = writer.submit(call(0, lambda: None))

    assert state.failure is not None
    assert state.failure.startswith("staging failed: the save cannot be sent to the writer: ")
    assert "lambda" in state.failure
    writer.forget(0)
    assert writer.usable


def test_nothing_of_a_save_stays_in_memory(writer: Writer, tmp_path: Path) -> None:
    def measured(index: int) -> int:
        writer.submit(call(index, memory, tmp_path / "memory"))
        assert ended(writer, index).done
        return int((tmp_path / "memory").read_text())

    before = measured(0)
    writer.submit(call(1, nothing, 0, None, preload=partial(operator.mul, b"x", 64 << 20)))
    assert ended(writer, 1).done

    assert measured(2) - before < 48 << 10


def test_a_writer_that_ends_is_heard_of(start: Start) -> None:
    writer = start(LONG)
    assert writer.submit(call(0, nothing)).staged
    assert writer.submit(call(1, put, "", "kept", ResultBox())).staged
    writer.submit(call(2, nothing, 0, 1, preload=leave))

    assert writer.poll(2).failure == "staging failed: the writer process ended with exit code 17"
    assert [ended(writer, index).done for index in (0, 1)] == [True, True]
    assert not writer.usable
    writer.close()
    writer.close()


def test_a_stopped_writer_is_given_up_and_ended(start: Start) -> None:
    writer = start(timedelta(seconds=5))
    assert writer.submit(call(0, nothing)).staged
    assert ended(writer, 0).done
    began = time.monotonic()
    writer.submit(call(1, stop))

    failure = ended(writer, 1).failure or ""
    assert re.fullmatch(r"writing failed: the writer process moved no byte for 5 s, \d+ bytes since its start", failure)
    assert 5 <= time.monotonic() - began < 15
    assert not writer.usable
    pid = writer.pid
    writer.close()
    assert not is_alive(pid)
    assert time.monotonic() - began < 20


def test_closing_does_not_wait_for_a_stopped_writer(start: Start) -> None:
    writer = start(LONG)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGSTOP)

    writer.close(grace=timedelta(seconds=0.5))

    assert not is_alive(writer.pid)
    assert not writer.usable
    assert writer.submit(call(0, nothing)).failure is not None
    writer.close()


def test_closing_ends_a_busy_writer_and_keeps_what_was_done(start: Start, tmp_path: Path) -> None:
    writer = start(LONG)
    writer.submit(call(0, put, "", "kept", ResultBox(), gate=tmp_path / "gate"))
    writer.submit(call(1, begin, tmp_path / "begun", tmp_path / "never"))
    (tmp_path / "gate").touch()
    wait_for(tmp_path / "begun")  # the first is done, and nobody has asked for it

    writer.close()

    assert pickle.loads(writer.poll(0).results)[0] == "kept"
    assert writer.poll(1).failure == "writing failed: the writer process ended with exit code -9"


def test_half_an_answer_stops_nobody() -> None:
    ours, theirs = Pipe(duplex=False)
    ear = _Ear(ours)
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"x")

    with pytest.raises(Empty):
        ear.get(0.2)
    theirs.close()
    assert [ear.get(5.0), ear.get(0.0)] == [None, None]


def test_too_little_shared_memory_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"{tmp_path} has \d+ bytes free and 1152921504606846976 bytes of tensors"):
        check_room(str(tmp_path), 1 << 60)
    check_room(str(tmp_path), 1)


def test_one_tensor_sent_twice_is_one_copy() -> None:
    tensor = torch.arange(3.0)

    first, second = pickle.loads(pickle_snapshot([tensor, tensor]))

    assert first.data_ptr() == second.data_ptr()
    assert first.tolist() == [0.0, 1.0, 2.0]


def is_alive(pid: int | None) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ends(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not is_alive(pid)


def trainer(script: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "GLOO_SOCKET_IFNAME": "lo"},
    )


@pytest.mark.parametrize("busy", [False, True], ids=["importing", "writing"])
def test_a_writer_ends_with_its_killed_trainer(tmp_path: Path, busy: bool) -> None:
    process = trainer(f"""
        import time
        from test_writer import LONG, SETTINGS, Path, Writer, call, wait_for
        writer = Writer(SETTINGS, LONG)
        if {busy}:
            writer.submit(call(0, wait_for, Path({str(tmp_path / "never")!r})))
        print(writer.pid, flush=True)
        time.sleep(600)
    """)
    assert process.stdout is not None
    pid = int(process.stdout.readline())

    process.kill()
    process.communicate()

    assert ends(pid, 60)


def test_an_interpreter_ends_with_a_queue_that_nobody_closed(tmp_path: Path) -> None:
    """Exit code 0, no traceback, no process left: idle or, as here, with one save finished and one being written."""
    process = trainer(f"""
        import torch.distributed as dist
        from test_writer import Path, SETTINGS, nothing, wait_for
        from megatron_ckpt_ext.commit.queue import AsyncSaveQueue
        from megatron_ckpt_ext.compat.nvrx import AsyncRequest
        dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0, world_size=1)
        queue = AsyncSaveQueue(lambda: SETTINGS)
        queue.schedule_async_request(AsyncRequest(nothing, (), [lambda: print("done")]))
        print(queue.maybe_finalize_async_calls(blocking=True))
        print(queue._writer.pid)
        queue.schedule_async_request(AsyncRequest(wait_for, (Path({str(tmp_path / "never")!r}),), []))
        dist.destroy_process_group()
    """)
    out, errors = process.communicate(timeout=90)

    assert process.returncode == 0
    assert "Traceback" not in errors
    assert "Exception" not in errors
    done, finalized, pid = out.split()
    assert (done, finalized) == ("done", "[0]")
    assert not is_alive(int(pid))
