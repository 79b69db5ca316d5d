"""What one row of ``scaling.py`` measures, each function in a process of its own."""

import contextlib
import gc
import itertools
import pickle
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import Counted, Counts
from synthetic_job import Shape, names, plan_of, results_of, slice_of
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.compat.dcp import METADATA_FILE
from megatron_ckpt_ext.compat.mcore import save_planner
from megatron_ckpt_ext.compat.nvrx import FileSystemWriterAsync
from megatron_ckpt_ext.metadata.body_reader import BodyReader
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.layout import Slice
from megatron_ckpt_ext.metadata.pickled import with_storage_meta
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata
from megatron_ckpt_ext.write.seal import ToStage, stage

__all__ = ["Loaded", "Published", "published", "started", "unpickled"]

PREPARED, WHOLE = "prepared.metadata", "whole.metadata"
OURS_A_REPETITION = 5
WARM_UP, WARM_UP_RANKS = "warm-up", 4
"""A tiny job: a process that loads it first has its own copies of the pages that it shared with its parent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """Seconds of the coordinator, by repetition, and bytes of the files."""

    stock: list[float]
    """NVRx's ``finish`` without the plans of all ranks, which NVRx itself never leaves out."""
    stock_with_plans: float
    """NVRx's ``finish`` as its cached saves call it: once."""
    background: list[float]
    """Ours: making ``.metadata`` durable under a temporary name."""
    first_background: float
    """Once a job, with reading the layout and looking through it."""
    training_thread: list[float]
    """Ours: what is left to do once all ranks have agreed; of each repetition the median of several."""
    global_plan: float
    """Planning together, which a save that follows a prepared file has not got: once."""
    file_bytes: int
    whole_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """One rank's start-up."""

    seconds: float
    counts: Counts


def published(shape: Shape, directory: str, repetitions: int) -> Published:
    """Make the files of a job in ``directory`` and publish, ours and stock's in turn.

    The layout comes from Megatron's planner and the synthetic plans; memory of about 3 KiB an entry.
    """
    with _garbage_collection(off=True):
        return _published(shape, directory, repetitions)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    plans: list[SavePlan]
    results: list[list[WriteResult]]
    metadata: Any
    """A ``Metadata``, to which NVRx adds the plans of all ranks."""
    global_plan: float
    """Seconds of planning together."""
    prepared: PreparedMetadata
    """The coordinator's part."""


def _made(shape: Shape, directory: str) -> _Job:
    """Plan, and write the files that ranks start from."""
    named = list(itertools.islice(names(shape), shape.total // shape.chunks))
    plans = [plan_of(shape, rank, named) for rank in range(shape.ranks)]
    results = [results_of(plan, rank) for rank, plan in enumerate(plans)]
    start = time.perf_counter()
    _, metadata = save_planner(keep_only_main_replica=True).create_global_plan(plans)
    global_plan = time.perf_counter() - start
    metadata.storage_data = {each.index: each.storage_data for of_rank in results for each in of_rank}
    slices = [slice_of(*pair, rank) for rank, pair in enumerate(zip(plans, results, strict=True))]
    prepared = _files(directory, metadata, slices)
    return _Job(plans=plans, results=results, metadata=metadata, global_plan=global_plan, prepared=prepared)


def _published(shape: Shape, directory: str, repetitions: int) -> Published:
    Path(directory, WARM_UP).mkdir()
    _made(Shape(entries=WARM_UP_RANKS, ranks=WARM_UP_RANKS), str(Path(directory, WARM_UP)))
    job = _made(shape, directory)
    reader = BodyReader()
    first, _ = _publish_ours(job.prepared, reader, _empty(directory))
    stock, background, training_thread = list[float](), list[float](), list[float]()
    for _ in range(repetitions):
        ours = [_publish_ours(job.prepared, reader, _empty(directory)) for _ in range(OURS_A_REPETITION)]
        background.append(statistics.median(in_writer for in_writer, _ in ours))
        training_thread.append(statistics.median(on_thread for _, on_thread in ours))
        stock.append(_publish_stock(job.metadata, job.results, _empty(directory)))
    job.metadata.all_local_plans = job.plans
    return Published(
        stock=stock,
        stock_with_plans=_publish_stock(job.metadata, job.results, _empty(directory)),
        background=background,
        training_thread=training_thread,
        first_background=first,
        global_plan=job.global_plan,
        file_bytes=Path(directory, PREPARED).stat().st_size,
        whole_bytes=Path(directory, WHOLE).stat().st_size,
    )


def _files(directory: str, metadata: Metadata, slices: list[Slice]) -> PreparedMetadata:
    """Write the prepared file, and the same layout as a plain ``.metadata``; return the coordinator's part."""
    meta = with_storage_meta(StorageMeta(checkpoint_id="step_1", save_id="1"))
    fingerprint = Fingerprint(world_size=len(slices))
    prepared = PreparedMetadata.create(slices[0], fingerprint, metadata=metadata)
    sections = [PreparedMetadata.create(own, fingerprint).section_bytes() for own in slices]
    path = Path(directory, PREPARED)
    with open(path, "wb") as file:
        file.writelines(prepared.file_chunks(meta, sections, identity="1"))
    if not isinstance(prepared.body, bytes):
        raise TypeError("a layout that was just made is in memory")
    with open(Path(directory, WHOLE), "wb") as file:
        file.writelines((prepared.body, meta))
    return PreparedMetadata.load(str(path), 0, len(slices))


def _publish_ours(prepared: PreparedMetadata, reader: BodyReader, directory: Path) -> tuple[float, float]:
    """Publish one save; seconds in the writer process and on the training thread."""
    start = time.perf_counter()
    suffix = with_storage_meta(StorageMeta(checkpoint_id=str(directory), save_id="1"))
    sealed = stage(
        [ToStage(path=str(directory / METADATA_FILE), body=prepared.body or b"", suffix=suffix)],
        reader,
        directory=str(directory),
    )
    ready = time.perf_counter()
    for file in sealed.staged:
        file.publish()
    end = time.perf_counter()
    if not (directory / METADATA_FILE).exists():
        raise RuntimeError(f"the save to be measured was not published: {sealed}")
    return ready - start, end - ready


def _publish_stock(metadata: Metadata, results: list[Any], directory: Path) -> float:
    writer = FileSystemWriterAsync(directory)
    start = time.perf_counter()
    writer.finish(metadata, results)
    return time.perf_counter() - start


def _empty(directory: str) -> Path:
    checkpoint = Path(directory, "checkpoint")
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir()
    return checkpoint


def started(directory: str, rank: int, ranks: int) -> Loaded:
    """Read one rank's part of the prepared file."""
    _load_prepared(Path(directory, WARM_UP), rank, WARM_UP_RANKS)
    counted = Counted()
    start = time.perf_counter()
    prepared = _load_prepared(Path(directory), rank, ranks)
    seconds = time.perf_counter() - start
    counts = counted.counts()
    del prepared
    return Loaded(seconds=seconds, counts=counts)


def unpickled(directory: str, collect: bool) -> Loaded:
    """Read the whole layout: what a rank does that has no slice. ``collect`` leaves the garbage collector on."""
    _load_whole(Path(directory, WARM_UP))
    counted = Counted()
    with _garbage_collection(off=not collect):
        start = time.perf_counter()
        metadata = _load_whole(Path(directory))
        seconds = time.perf_counter() - start
    counts = counted.counts()
    del metadata
    return Loaded(seconds=seconds, counts=counts)


def _load_prepared(directory: Path, rank: int, ranks: int) -> PreparedMetadata:
    return PreparedMetadata.load(str(directory / PREPARED), rank, ranks)


def _load_whole(directory: Path) -> Metadata:
    with open(directory / WHOLE, "rb") as file:
        metadata: Metadata = pickle.load(file)
    return metadata


@contextlib.contextmanager
def _garbage_collection(*, off: bool) -> Iterator[None]:
    if off:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()
