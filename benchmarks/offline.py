"""``python benchmarks/offline.py``: how long the offline commands take, against the least that they have to do.

A checkpoint with very many items, whose files are holes: ``inspect`` and ``verify`` against unpickling its
``.metadata`` through the allow-list, and throwing it away. They should take at most 1.5 times that, and do not yet, so
that no limit is judged. A checkpoint with many bytes, in the page cache: ``verify --deep`` against reading the same
files, and against their CRC-32, on the same cores; its speed is to be 0.8 of the slower of the two. All sides in turn,
in one process.
"""

import argparse
import os
import pickle
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
from report import Limit, Spread, add_output_arguments, publish  # noqa: E402
from rich.table import Table  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save  # noqa: E402

from megatron_ckpt_ext.compat.dcp import METADATA_FILE, StorageInfo  # noqa: E402
from megatron_ckpt_ext.examine.archive import CHUNK  # noqa: E402
from megatron_ckpt_ext.examine.summary import summarize  # noqa: E402
from megatron_ckpt_ext.examine.verdict import examine_checkpoint  # noqa: E402
from megatron_ckpt_ext.metadata.pickled import load_metadata  # noqa: E402

RANKS, SHARDS, ITEM_BYTES = 64, 100, 512
PART = 256 << 20
DEEP_SPEED = 0.8
INSPECT, VERIFY, UNPICKLE = "inspect", "verify", "unpickling"
DEEP, READ, CRC = "verify --deep", "reading", "CRC-32"


def make_many_items(directory: Path, items: int) -> None:
    """Describe tensors of 100 shards on 64 ranks, in files without content."""
    directory.mkdir()
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places, reached = {}, [0] * RANKS
    for number in range(max(1, items // SHARDS)):
        name = f"decoder.layers.{number}.mlp.linear_fc1.weight"
        chunks = [ChunkStorageMetadata(torch.Size([8 * at, 0]), torch.Size([8, 16])) for at in range(SHARDS)]
        for at, chunk in enumerate(chunks):
            rank = (number * SHARDS + at) % RANKS
            index = MetadataIndex(name, chunk.offsets, at)
            places[index] = StorageInfo(f"__{rank}_0.distcp", reached[rank], ITEM_BYTES)
            reached[rank] += ITEM_BYTES
        shape = torch.Size([8 * SHARDS, 16])
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), shape, chunks)
    (directory / METADATA_FILE).write_bytes(pickle.dumps(Metadata(tensors, None, places)))
    for rank, size in enumerate(reached):
        with open(directory / f"__{rank}_0.distcp", "wb") as file:
            file.truncate(size)


def make_many_bytes(directory: Path, mebibytes: int) -> None:
    """Save random tensors of 64 MiB, or one smaller one."""
    elements = min(mebibytes, 64) << 18
    state = {f"weight.{number}": torch.rand(elements) for number in range(max(1, mebibytes // 64))}
    save(state, checkpoint_id=directory, no_dist=True)


def timed(sides: dict[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Run all sides in turn; return seconds by side."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repetitions):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def read_all(files: list[Path], *, checksum: bool) -> None:
    """Read files on all cores, in parts."""
    parts = [(file, begin) for file in files for begin in range(0, file.stat().st_size, PART)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda part: read_part(*part, checksum=checksum), parts))


def read_part(path: Path, begin: int, *, checksum: bool) -> int:
    """Read a part of a file into one buffer; return its CRC-32, if asked for."""
    view, found, left = memoryview(bytearray(CHUNK)), 0, min(PART, path.stat().st_size - begin)
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        while left:
            count = file.readinto(view[: min(left, CHUNK)])
            found = zlib.crc32(view[:count], found) if checksum else found
            left -= count
    return found


def ratios(above: list[float], below: list[float]) -> Spread:
    """Ratios of what was timed in the same turn."""
    return Spread.of([left / right for left, right in zip(above, below, strict=True)])


def main() -> int:
    """Make both checkpoints, and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--mebibytes", type=int, default=1536)
    parser.add_argument("--directory", type=Path, help="where to save; by default the system's temporary one")
    add_output_arguments(parser, repetitions=5)
    options = parser.parse_args()
    output = Path(tempfile.mkdtemp(prefix="offline-", dir=options.directory))
    try:
        make_many_items(output / "items", options.items)
        make_many_bytes(output / "bytes", options.mebibytes)
        pickled = (output / "items" / METADATA_FILE).read_bytes()
        described = timed(
            {
                UNPICKLE: lambda: load_metadata(pickled, origin=METADATA_FILE),
                INSPECT: lambda: summarize(output / "items"),
                VERIFY: lambda: examine_checkpoint(output / "items"),
            },
            options.repetitions,
        )
        files = sorted((output / "bytes").glob("*.distcp"))
        read = timed(
            {
                DEEP: lambda: examine_checkpoint(output / "bytes", deep=True),
                READ: lambda: read_all(files, checksum=False),
                CRC: lambda: read_all(files, checksum=True),
            },
            options.repetitions,
        )
    finally:
        shutil.rmtree(output, ignore_errors=True)
    slower = [max(pair) for pair in zip(read[READ], read[CRC], strict=True)]
    speed = ratios(slower, read[DEEP])
    against = {name: ratios(described[name], described[UNPICKLE]) for name in (INSPECT, VERIFY)}
    title = f"{options.items:,} items; {options.mebibytes:,} MiB on {len(os.sched_getaffinity(0))} cores"
    table = Table("what", "seconds", "ratio", title=title)
    for name, seconds in (described | read).items():
        table.add_row(name, str(Spread.of(seconds)), str(against.get(name, speed if name == DEEP else "")))
    return publish(
        "offline",
        [table],
        {"seconds": described | read, "ratios": {**against, DEEP: speed}},
        bars={
            **{f"{name} / unpickling": (value, None) for name, value in against.items()},
            f"speed of {DEEP}": (speed, DEEP_SPEED),
        },
        unit="ratio",
        limits=[Limit(what=f"speed of {DEEP}, of the slower one", value=speed, bound=DEEP_SPEED, at_least=True)],
        options=options,
    )


if __name__ == "__main__":
    sys.exit(main())
