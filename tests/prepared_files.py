"""Prepared metadata made without a job: the layout of any number of ranks, and files that hold it, sound or crafted.

`TRAILER` and `ENTRY` are the file format as its readers outside this package would write it down, and are
independent of the package's own constants: a change of the format must be noticed here.
"""

import json
import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_ckpt_ext.compat.dcp import StorageInfo
from megatron_ckpt_ext.metadata.body_reader import BodyReader
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.items import describe_metadata, locators_of
from megatron_ckpt_ext.metadata.layout import Slice
from megatron_ckpt_ext.metadata.pickled import with_storage_meta
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata, plain_fingerprint

TRAILER = struct.Struct("<QIQIQIIIII8s")
ENTRY = struct.Struct("<QQI")
MAGIC = b"MCKPTEXT"
CHUNK_BYTES = 96

FINGERPRINT = Fingerprint(
    world_size=2,
    tensor_parallel=2,
    pipeline_parallel=4,
    context_parallel=1,
    expert_parallel=8,
    ckpt_format="torch_dist",
    workers_per_rank=1,
    drops_redundant_extra_state=False,
    optimizer_sharding="dp_reshardable",
    torch_version="2.14.1",
    megatron_version="0.19.2",
    nvrx_version="0.7.0",
)
"""Settings of a job, all known."""


class Trailer(NamedTuple):
    """The fixed-size end of a prepared file, field by field."""

    header_offset: int
    header_length: int
    index_offset: int
    world_size: int
    body_length: int
    header_crc: int
    index_crc: int
    body_crc: int
    own_crc: int
    version: int
    magic: bytes

    def packed(self) -> bytes:
        """Return its bytes with a sound checksum."""
        crc = zlib.crc32(TRAILER.pack(*self._replace(own_crc=0)))
        return TRAILER.pack(*self._replace(own_crc=crc))


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Where the parts of a prepared file lie."""

    body: range
    suffix: range
    sections: tuple[range, ...]
    entries: tuple[range, ...]
    header: range
    footer: range

    @classmethod
    def of(cls, data: bytes) -> "Ranges":
        trailer = trailer_of(data)
        index = range(trailer.index_offset, trailer.header_offset)
        entries = tuple(range(start, start + ENTRY.size) for start in index[:: ENTRY.size])
        sections = []
        for entry in entries:
            start, length, _ = ENTRY.unpack(data[entry.start : entry.stop])
            sections.append(range(start, start + length))
        return cls(
            body=range(trailer.body_length),
            suffix=range(trailer.body_length, sections[0].start),
            sections=tuple(sections),
            entries=entries,
            header=range(trailer.header_offset, trailer.header_offset + trailer.header_length),
            footer=range(len(data) - TRAILER.size, len(data)),
        )


def trailer_of(data: bytes) -> Trailer:
    """Read the end of a prepared file."""
    return Trailer(*TRAILER.unpack(data[-TRAILER.size :]))


def layout(world_size: int = 2, *, workers: int = 1, hint: str = "") -> Metadata:
    """Describe a checkpoint in which every rank has one shard of each tensor and an object of its own."""
    properties = TensorProperties(dtype=torch.bfloat16)
    entries: dict[str, Any] = {}
    located: dict[MetadataIndex, Any] = {}
    for number in range(2):
        chunks = [ChunkStorageMetadata(torch.Size([4 * rank, 0]), torch.Size([4, 6])) for rank in range(world_size)]
        entries[f"model.{number}.weight"] = TensorStorageMetadata(properties, torch.Size([4 * world_size, 6]), chunks)
        for rank in range(world_size):
            index = MetadataIndex(f"model.{number}.weight", torch.Size([4 * rank, 0]), rank)
            path = f"{hint}__{rank}_{number % workers}.distcp"
            located[index] = StorageInfo(path, CHUNK_BYTES * (1 + number // workers), CHUNK_BYTES)
    for rank in range(world_size):
        name = f"rng/shard_{rank}_{world_size}"
        entries[name] = BytesStorageMetadata()
        located[MetadataIndex(name)] = StorageInfo(f"{hint}__{rank}_0.distcp", 0, CHUNK_BYTES)
    meta = StorageMeta(checkpoint_id="/checkpoints/step_1", save_id="first")
    return Metadata(entries, storage_data=located, storage_meta=meta, version="1.0.0")


def slice_of(metadata: Metadata, rank: int) -> Slice:
    """Build the slice of a rank that holds what it writes, and one replica of each other item."""
    return Slice(rank=rank, locators=locators_of(metadata, rank), held=describe_metadata(metadata))


def prepared_bytes(metadata: Metadata, fingerprint: Fingerprint = FINGERPRINT, *, identity: str = "file-1") -> bytes:
    """Build a prepared file as the coordinator of a job does."""
    world_size = plain_fingerprint(metadata).world_size or 0
    settings = replace(fingerprint, world_size=world_size)
    parts = [PreparedMetadata.create(slice_of(metadata, rank), settings) for rank in range(world_size)]
    whole = PreparedMetadata.create(slice_of(metadata, 0), settings, metadata=metadata)
    sections = [part.section_bytes() for part in parts]
    suffix = with_storage_meta(metadata.storage_meta)
    return b"".join(whole.file_chunks(suffix, sections, identity=identity))


def published(prepared: PreparedMetadata, storage_meta: StorageMeta | None) -> Metadata:
    """Return the metadata that the coordinator publishes for one checkpoint."""
    assert prepared.body is not None
    data = b"".join([*BodyReader().read(prepared.body), with_storage_meta(storage_meta)])
    metadata = pickle.loads(data)
    assert isinstance(metadata, Metadata)
    return metadata


def crafted_bytes(
    *,
    sections: Sequence[Any],
    header: Any = None,
    body: bytes = b"\x80\x04}",
    suffix: bytes = b".",
    entries: Mapping[int, tuple[int, int, int]] | None = None,
    **trailer: Any,
) -> bytes:
    """Build a file with sound checksums around any content.

    Args:
        sections: JSON data or bytes, one a rank.
        header: JSON data or bytes; by default the fingerprint of `FINGERPRINT`.
        body: the pickle without its end.
        suffix: its end.
        entries: index entries to lie about: rank -> offset, length, CRC-32.
        trailer: fields of `Trailer` to lie about.
    """
    made = [section if isinstance(section, bytes) else json.dumps(section).encode() for section in sections]
    position = len(body) + len(suffix)
    index = b""
    for rank, section in enumerate(made):
        entry = (entries or {}).get(rank, (position, len(section), zlib.crc32(section)))
        index += ENTRY.pack(*entry)
        position += len(section)
    header = {"fingerprint": FINGERPRINT.to_json(), "identity": "crafted"} if header is None else header
    header_bytes = header if isinstance(header, bytes) else json.dumps(header).encode()
    fields = Trailer(
        header_offset=position + len(index),
        header_length=len(header_bytes),
        index_offset=position,
        world_size=len(made),
        body_length=len(body),
        header_crc=zlib.crc32(header_bytes),
        index_crc=zlib.crc32(index),
        body_crc=zlib.crc32(body),
        own_crc=0,
        version=1,
        magic=MAGIC,
    )
    return b"".join((body, suffix, *made, index, header_bytes, fields._replace(**trailer).packed()))


def written(path: Path, data: bytes) -> str:
    """Write a file and return its path as the command line would have it."""
    path.write_bytes(data)
    return str(path)
