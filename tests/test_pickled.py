"""Pickles of a `Metadata`: a body that is completed for each checkpoint, and reading that runs no foreign code."""

import io
import os
import pickle
import pickletools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prepared_files import layout
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

from megatron_ckpt_ext.compat.dcp import METADATA_GLOBALS, PLAN_GLOBALS, StorageInfo
from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.pickled import load_metadata, metadata_body, with_storage_meta

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn]
FRAME = 64 << 10
"""Size at which pickle protocol 4 closes a frame, in bytes."""
MODULE = "torch.distributed.checkpoint.metadata"

texts = st.text(st.characters(codec=None), max_size=40) | st.sampled_from(["", "\ud800", "x" * 300, "y" * 70_000])
ids = st.none() | texts
storage_metas = st.none() | st.builds(
    StorageMeta, checkpoint_id=ids, save_id=ids, load_id=ids, modules=st.lists(texts, max_size=3)
)


@st.composite
def metadatas(draw: st.DrawFn) -> Metadata:
    """Any layout, and so much planner data that its pickle has no, one or several frames that end anywhere."""
    entries: dict[str, Any] = {}
    located: dict[MetadataIndex, Any] = {}
    for name in draw(st.lists(texts, max_size=4, unique=True)):
        shape = draw(st.lists(st.integers(0, 2**40), max_size=3))
        tensor = draw(st.booleans())
        offset = torch.Size([0] * len(shape)) if tensor else None
        if tensor:
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
            properties = TensorProperties(dtype=draw(st.sampled_from(DTYPES)))
            entries[name] = TensorStorageMetadata(properties, torch.Size(shape), [chunk])
        else:
            entries[name] = BytesStorageMetadata()
        located[MetadataIndex(name, offset, 0)] = StorageInfo("__0_0.distcp", *draw(st.tuples(*[st.integers(0)] * 2)))
    filler = [f"{number:03}" * draw(st.integers(1, 90)) for number in range(draw(st.integers(0, 400)))]
    return Metadata(
        entries,
        planner_data=draw(st.sampled_from([None, filler, {"filler": filler}])),
        storage_data=located,
        storage_meta=draw(storage_metas),
        version=draw(st.none() | texts),
    )


def unpickled(data: bytes) -> list[Any]:
    """What both unpicklers of Python make of it, and a reader of a file in which more follows."""
    return [
        pickle.loads(data),
        pickle._Unpickler(io.BytesIO(data)).load(),
        pickle.load(io.BytesIO(data + b"a trailer")),
    ]


@given(metadata=metadatas(), first=storage_metas, second=storage_metas)
def test_a_body_is_completed_for_each_checkpoint(
    metadata: Metadata, first: StorageMeta | None, second: StorageMeta | None
) -> None:
    body = metadata_body(metadata)

    for storage_meta in (first, second, first):
        expected = replace(metadata, storage_meta=storage_meta)
        assert unpickled(body + with_storage_meta(storage_meta)) == [expected] * 3


@pytest.mark.parametrize("version", [None, "1"])
def test_a_body_may_end_anywhere_around_the_end_of_a_frame(version: str | None) -> None:
    """The C pickler closes a frame once it holds 64 KiB; the last one can be as short as four bytes."""
    meta = StorageMeta(checkpoint_id="/checkpoints/step_1", save_id="first")
    overhead = len(metadata_body(Metadata({}, planner_data=["x" * 300] * 2, storage_data={}))) - 300
    last_frames: set[Any] = set()

    for length in range(FRAME - overhead - 330, FRAME - overhead + 40):
        metadata = Metadata({"z": BytesStorageMetadata()}, planner_data=["x" * length, "y"], storage_data={})
        metadata.version = version
        body = metadata_body(metadata)
        frames = [size for opcode, size, _ in pickletools.genops(body + b".") if opcode.name == "FRAME"]
        last_frames.update(frames[1:])
        assert unpickled(body + with_storage_meta(meta)) == [replace(metadata, storage_meta=meta)] * 3
    assert min(last_frames) == (4 if version is None else 7)


def test_a_path_as_checkpoint_id_becomes_text() -> None:
    meta = StorageMeta(checkpoint_id=Path("/checkpoints/step_1"))

    (loaded, *_) = unpickled(metadata_body(layout(1)) + with_storage_meta(meta))

    assert loaded.storage_meta == replace(meta, checkpoint_id="/checkpoints/step_1")


def test_a_body_does_not_change_its_metadata_and_names_no_checkpoint() -> None:
    metadata = layout(2)
    metadata.storage_meta = StorageMeta(checkpoint_id="/unique/checkpoint/id")
    before = pickle.dumps(metadata)

    assert b"/unique/checkpoint/id" not in metadata_body(metadata)
    assert pickle.dumps(metadata) == before


@given(metadata=metadatas(), protocol=st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_what_any_protocol_wrote_is_read(metadata: Metadata, protocol: int) -> None:
    assert load_metadata(pickle.dumps(metadata, protocol=protocol), origin="it") == metadata


@dataclass
class Call:
    """Pickles to the call of a function, as an object with a hostile ``__reduce__`` does."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


class HostileMeta(StorageMeta):
    """Looks like an allowed class to whoever made it; its ``__reduce__`` decides what the pickle says."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (str(self.checkpoint_id),)


def stack_global(module: str, name: str, *arguments: str) -> bytes:
    """A protocol 4 pickle that calls a dotted name."""
    call = b"".join(_text(argument) for argument in arguments)
    return b"\x80\x04" + _text(module) + _text(name) + b"\x93(" + call + b"tR."


def text_global(module: str, name: str, argument: str) -> bytes:
    """A protocol 0 pickle, of lines of text, that calls a name."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


HOSTILE: dict[str, Callable[[str], bytes]] = {
    "os.system": lambda command: pickle.dumps(Call(os.system, (command,))),
    "posix.system, protocol 0": lambda command: text_global("posix", "system", command),
    "os.system, protocol 0": lambda command: text_global("os", "system", command),
    "posix.system, STACK_GLOBAL": lambda command: stack_global("posix", "system", command),
    "eval": lambda command: pickle.dumps(Call(eval, (f"__import__('os').system({command!r})",))),
    "exec, Python 2 name": lambda command: text_global("__builtin__", "eval", f"__import__('os').system({command!r})"),
    "getattr": lambda command: stack_global("builtins", "getattr", "os", "system"),
    "dotted name of an allowed module": lambda command: stack_global(MODULE, "os.system", command),
    "dotted name of an allowed class": lambda command: stack_global(MODULE, "Metadata.__init__.__globals__", command),
    "dotted name of a path class": lambda command: stack_global("pathlib", "PosixPath.touch", command),
    "dotted name in torch": lambda command: stack_global("torch", "os.system", command),
    "torch.load": lambda command: stack_global("torch", "load", command),
    "torch.storage._load_from_bytes": lambda command: stack_global("torch.storage", "_load_from_bytes", command),
    "torch._utils._rebuild_tensor_v2": lambda command: stack_global("torch._utils", "_rebuild_tensor_v2", command),
    "an importer of torch": lambda command: stack_global("torch", "_dynamo", command),
    "functools.partial": lambda command: stack_global("functools", "partial", command),
    "subclass of an allowed class": lambda command: pickle.dumps(HostileMeta(checkpoint_id=command)),
    "inside a Metadata": lambda command: pickle.dumps(replace(layout(1), planner_data=Call(os.system, (command,)))),
    "as storage_data": lambda command: pickle.dumps(replace(layout(1), storage_data=Call(os.system, (command,)))),
    "as local plan": lambda command: pickle.dumps(_with_plans(Call(os.system, (command,)))),
    "INST": lambda command: f"(V{command}\nios\nsystem\n.".encode(),
    "persistent id": lambda command: f"P{command}\n.".encode(),
    "extension registry": lambda command: b"\x80\x02\x82\x01.",
}


NAMELESS = {"persistent id", "extension registry"}
"""Those that refer to no global; the unpickler does not know what they refer to."""


def _with_plans(plan: object) -> Metadata:
    metadata = layout(1)
    metadata.all_local_plans = [plan]  # type: ignore[attr-defined]
    return metadata


@pytest.mark.parametrize("name", HOSTILE)
def test_a_crafted_pickle_runs_nothing(tmp_path: Path, name: str) -> None:
    proof = tmp_path / "executed"

    with pytest.raises(PreparedFileError) as caught:
        load_metadata(HOSTILE[name](f"touch {proof}"), origin="the file it came from")

    assert not proof.exists()
    assert str(caught.value).startswith("the file it came from")
    assert ("nothing was run" in str(caught.value)) == (name not in NAMELESS)


@pytest.mark.parametrize("name", ["os.system", "posix.system, protocol 0", "as local plan"])
def test_the_crafted_pickles_would_run(tmp_path: Path, name: str) -> None:
    """Otherwise the test above proves nothing."""
    proof = tmp_path / "executed"

    pickle.loads(HOSTILE[name](f"touch {proof}"))

    assert proof.exists()


def test_a_forbidden_name_is_named() -> None:
    with pytest.raises(PreparedFileError, match=r"^it: it refers to posix\.system, .*nothing was run\. Use a file"):
        load_metadata(HOSTILE["posix.system, STACK_GLOBAL"]("true"), origin="it")


def attributes(owners: Sequence[Any]) -> list[dict[str, Any]]:
    return [{**vars(owner), "": (getattr(owner, "__name__", ""), getattr(owner, "__bases__", ()))} for owner in owners]


def build(load: bytes, state: bytes) -> bytes:
    """A pickle that applies `state` to what `load` loads, as if that were an instance."""
    return b"\x80\x02" + load + state + b"b."


def slots(name: str, value: bytes = b"K\x07") -> bytes:
    """State that sets one attribute through ``setattr``."""
    return b"N}" + _text(name) + value + b"s\x86"


@pytest.mark.parametrize(
    "crafted",
    [
        build(f"c{MODULE}\nMetadata\n".encode(), slots("__eq__")),
        build(f"c{MODULE}\nMetadata\n".encode(), slots("version", _text("hostile"))),
        build(f"c{MODULE}\nMetadata\n".encode(), slots("brand_new")),
        build(f"c{MODULE}\nMetadata\n".encode(), slots("__name__", _text("Other"))),
        build(f"c{MODULE}\nMetadataIndex\n".encode(), slots("__setstate__", f"c{MODULE}\nStorageMeta\n".encode())),
        build(b"ctorch.distributed.checkpoint.planner\nWriteItemType\n", slots("_value2member_map_", b"}")),
        build(
            b"ctorch.distributed.checkpoint.planner\nWriteItemType\n(K\x01tR",
            b"}" + _text("_value_") + b"K\x02s",
        ),
        build(b"ctorch.serialization\n_get_layout\n", slots("__defaults__", b"(K\x01t")),
    ],
    ids=["method", "default", "new attribute", "name", "__setstate__", "enum", "enum member", "function"],
)
def test_a_crafted_pickle_changes_no_class(crafted: bytes) -> None:
    """BUILD sets attributes of whatever is on the stack, also of a class that lives on in this process."""
    owners = [Metadata, MetadataIndex, WriteItemType, *WriteItemType]
    layouts = torch.serialization._get_layout
    before = attributes(owners), layouts.__defaults__

    with pytest.raises(PreparedFileError):
        load_metadata(crafted, origin="it")

    assert (attributes(owners), layouts.__defaults__) == before


def test_garbage_collection_is_on_again() -> None:
    import gc

    assert gc.isenabled()
    load_metadata(pickle.dumps(layout(1)), origin="it")
    assert gc.isenabled()
    with pytest.raises(PreparedFileError):
        load_metadata(b"", origin="it")
    assert gc.isenabled()


def test_the_allow_list_holds_data_classes_only() -> None:
    """A later torch must not slip a class that does something when it is made into the names that are allowed."""
    known = {"Size", "_get_layout", "OrderedDict", "_MEM_FORMAT_ENCODING", "WriteItemType", "PosixPath"}

    for module, name in METADATA_GLOBALS | PLAN_GLOBALS:
        if name not in known:
            found = getattr(__import__(module, fromlist=[name]), name)
            assert fields(found) is not None
            assert not hasattr(found, "__post_init__"), name
            assert not hasattr(found, "__del__"), name
