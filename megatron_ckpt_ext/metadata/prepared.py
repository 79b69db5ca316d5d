"""``PreparedMetadata``: what one rank keeps of a layout that was described once and is reused by every save."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.body import BodyFile
from megatron_ckpt_ext.metadata.body_reader import BodyReader
from megatron_ckpt_ext.metadata.container import Container, container_chunks
from megatron_ckpt_ext.metadata.fingerprint import Difference, Fingerprint
from megatron_ckpt_ext.metadata.guard import (
    Drift,
    find_held_drift,
    find_layout_drift,
    find_unknown_item,
    places_digest,
)
from megatron_ckpt_ext.metadata.items import describe_metadata, item_of, locators_of
from megatron_ckpt_ext.metadata.layout import Item, Locator, Slice, owner_of, workers_per_rank
from megatron_ckpt_ext.metadata.pickled import load_metadata, metadata_body, paused_garbage_collection

__all__ = ["FingerprintMismatchError", "PreparedMetadata"]


class FingerprintMismatchError(PreparedFileError):
    """A readable prepared metadata of a job with other settings.

    Attributes:
        differences: the structural fields that differ.
        ours: whether the file is in our format, so that we may replace it.
    """

    def __init__(self, path: str, differences: Sequence[Difference], *, ours: bool) -> None:
        """Name the fields and both values."""
        self.differences = tuple(differences)
        self.ours = ours
        listed = "; ".join(str(difference) for difference in self.differences)
        super().__init__(
            f"prepared metadata {path!r} was made for another job layout: {listed}. "
            "Make a new one with --ckpt-metadata-create and another FILE, or go back to those settings"
        )


@dataclass(frozen=True, kw_only=True)
class PreparedMetadata:
    """One rank's view of a prepared metadata. Immutable, picklable, owns no resources.

    The coordinator also knows where the bytes of the whole layout are, to publish them; others have their slice only.
    """

    fingerprint: Fingerprint
    """Settings of the job that made it."""
    slice: Slice
    """What this rank writes and holds."""
    body: bytes | BodyFile | None = None
    """Pickle of the whole layout without its end (see ``metadata.pickled``), or where it is; the coordinator only."""
    known: Mapping[Item, str] | None = None
    """Description of every item of the job; only from a plain ``Metadata``, which names no holders."""
    identity: str = ""
    """Tells the file that it came from apart from other files; empty if it came from none."""
    path: str | None = None
    """The file that it came from."""
    in_our_format: bool = True
    """Whether it came from a file with our trailer, or from this job."""

    @cached_property
    def places(self) -> bytes:
        """``places_digest`` of the slice, made once for all saves."""
        return places_digest(self.slice.locators)

    @classmethod
    def load(
        cls, path: str, rank: int, world_size: int, *, expected: Fingerprint | None = None, coordinator: int = 0
    ) -> "PreparedMetadata":
        """Read one rank's part of a prepared file, or any checkpoint's ``.metadata``. No collectives.

        A file in our format costs the footer, the header and one section, on the coordinator too: the layout itself is
        read by the first save, in the background, and made anew if it is not sound. A plain pickle is read whole.

        Args:
            path: the file.
            rank: the rank whose slice to read.
            world_size: number of ranks of this job.
            expected: settings of this job; unknown ones (``None``) are not compared.
            coordinator: the rank that will publish and so needs the bytes of the layout.

        Raises:
            PreparedFileError: missing, damaged, or hostile.
            FingerprintMismatchError: a structural field differs; its world size always counts.
        """
        current = _with_world_size(expected or Fingerprint(), world_size)
        with paused_garbage_collection(), Container.open(path) as file:
            if not file.has_trailer:
                data = file.whole_file()
                metadata = load_metadata(data, origin=f"prepared metadata {path!r}")
                with _naming(path):
                    plain = cls.from_metadata(metadata, rank, coordinator=coordinator)
                _refuse_differences(path, plain.fingerprint, current, ours=False)
                return replace(plain, path=path, identity=f"crc32 {zlib.crc32(data):08x}")
            header = file.header()
            with _naming(path):
                fingerprint = Fingerprint.from_json(header["fingerprint"])
            _refuse_differences(path, _with_world_size(fingerprint, file.world_size), current, ours=True)
            section = file.section(rank)
            with _naming(path):
                own = Slice.from_json(section)
                if own.rank != rank:
                    raise PreparedFileError(f"the section of rank {rank} is one of rank {own.rank}")
            return cls(
                fingerprint=fingerprint,
                slice=own,
                body=file.body_file() if rank == coordinator else None,
                path=path,
                identity=str(header.get("identity", "")),
            )

    @classmethod
    def from_metadata(cls, metadata: Metadata, rank: int, *, coordinator: int = 0) -> "PreparedMetadata":
        """Use a complete in-memory ``Metadata``. No collectives.

        It names no holders, so a rank checks that everything it holds is known to the whole layout.

        Raises:
            PreparedFileError: it is incomplete, or a path leaves the checkpoint directory or tells no rank.
        """
        if not isinstance(metadata.storage_data, dict):
            raise PreparedFileError("the Metadata to reuse has no storage_data: pass one read back from a checkpoint")
        known = describe_metadata(metadata)
        if halves := known.keys() ^ {item_of(index) for index in metadata.storage_data}:
            raise PreparedFileError(f"the layout of {min(halves, key=str)} is incomplete: it has no place, or no shape")
        return cls(
            fingerprint=plain_fingerprint(metadata),
            slice=Slice(rank=rank, locators=locators_of(metadata, rank), held=None),
            body=metadata_body(metadata) if rank == coordinator else None,
            known=known,
            in_our_format=False,
        )

    @classmethod
    def create(cls, own: Slice, fingerprint: Fingerprint, *, metadata: Metadata | None = None) -> "PreparedMetadata":
        """Make it from a save that was just written. No collectives.

        Args:
            own: what this rank wrote and holds.
            fingerprint: settings of this job.
            metadata: the whole layout with its locators; the coordinator only.
        """
        body = None if metadata is None else metadata_body(metadata)
        return cls(fingerprint=fingerprint, slice=own, body=body)

    def in_memory(self) -> "PreparedMetadata":
        """Return the same with the bytes of the whole layout in memory. Coordinator only, no collectives.

        Raises:
            PreparedFileError: this rank has no layout, or it cannot be read, or it is not harmless.
        """
        if self.body is None:
            raise PreparedFileError("this rank has no bytes of the layout: it was loaded for another coordinator")
        return self if isinstance(self.body, bytes) else replace(self, body=b"".join(BodyReader().read(self.body)))

    @property
    def known_items(self) -> Mapping[Item, str]:
        """The items for which the layout has a place, of those that this rank may hold."""
        return self.slice.held if self.slice.held is not None else self.known or {}

    def held_drift(self, held: Mapping[Item, str]) -> Drift | None:
        """Compare what this rank holds with what it held at create time. No collectives."""
        if self.slice.held is not None:
            return find_held_drift(self.slice.held, held)
        return find_unknown_item(self.known or {}, held)

    def layout_drift(self, written: Mapping[Item, Locator]) -> Drift | None:
        """Compare what this rank wrote with its slice, both ways. No collectives."""
        return find_layout_drift(self.slice, written)

    def file_chunks(self, suffix: bytes, sections: Sequence[bytes], *, identity: str) -> Iterable[bytes]:
        """Return the bytes of the prepared file. No collectives; only where the body is in memory.

        Args:
            suffix: what completes the body to a valid pickle.
            sections: ``section_bytes`` of every rank, in rank order.
            identity: distinguishes this file from an older one at the same path.

        Raises:
            PreparedFileError: the body is not in memory.
        """
        if not isinstance(self.body, bytes):
            raise PreparedFileError("only a layout that this process made or read whole can be written to a file")
        header: dict[str, Any] = {"fingerprint": self.fingerprint.to_json(), "identity": identity}
        return container_chunks(body=self.body, suffix=suffix, header=header, sections=sections)

    def section_bytes(self) -> bytes:
        """Return this rank's section of the prepared file."""
        return json.dumps(self.slice.to_json(), separators=(",", ":")).encode()


def plain_fingerprint(metadata: Metadata) -> Fingerprint:
    """Read what a plain ``Metadata`` tells about its job from its file names: world size and workers."""
    paths = {info.relative_path for info in metadata.storage_data.values()}
    owners = [owner for path in paths if (owner := owner_of(path)) is not None]
    return Fingerprint(
        world_size=max(owners) + 1 if owners else None,
        workers_per_rank=workers_per_rank(paths),
    )


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Name the file in what is wrong inside it; a sound checksum or pickle still says nothing about the content."""
    try:
        yield
    except (PreparedFileError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = error if isinstance(error, PreparedFileError) else repr(error)
        raise PreparedFileError(f"prepared metadata {path!r} cannot be used: {reason}") from error


def _with_world_size(fingerprint: Fingerprint, world_size: int) -> Fingerprint:
    return replace(fingerprint, world_size=world_size)


def _refuse_differences(path: str, prepared: Fingerprint, current: Fingerprint, *, ours: bool) -> None:
    differences = prepared.structural_differences(current)
    if differences:
        raise FingerprintMismatchError(path, differences, ours=ours)
