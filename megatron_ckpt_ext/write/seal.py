"""The end of a write, in the process that writes: was it what the layout says, and are the files to publish durable?"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.body import BodyFile
from megatron_ckpt_ext.metadata.body_reader import BodyReader
from megatron_ckpt_ext.metadata.guard import places_digest
from megatron_ckpt_ext.metadata.items import places_of
from megatron_ckpt_ext.publish.atomic import StagedFile, make_names_durable, stage_file

__all__ = ["Seal", "Sealed", "ToStage", "discard", "stage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """What came of it; plain data."""

    follows: bool
    """Whether the rank wrote what its slice says; who has the slice finds out what differs."""
    staged: tuple[StagedFile, ...] = ()
    """Files to publish, in order; durable under temporary names."""
    lost: str = ""
    """Why the layout cannot be published any more, if so: another one has to be made."""
    failure: str = ""
    """Why the files could not be written, if so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToStage:
    """One file to publish."""

    path: str
    """Its final name."""
    body: bytes | BodyFile = b""
    """What it begins with."""
    suffix: bytes = b""
    """What follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seal:
    """What is to be done behind a write that follows a layout. Picklable."""

    places: bytes
    """``places_digest`` of the rank's slice."""
    directory: str
    """Of the checkpoint."""
    files: tuple[ToStage, ...] = ()
    """On the coordinator: what to stage, in the order in which it will be published."""

    def apply(self, results: Sequence[WriteResult] | None, reader: BodyReader) -> Sealed:
        """Compare, and stage if the rank follows. No collectives; what goes wrong is in the answer.

        Args:
            results: what was written; ``None`` if writing failed.
            reader: reads the layout.
        """
        if results is None or places_digest(places_of(results)) != self.places:
            return Sealed(follows=False)
        return stage(self.files, reader, directory=self.directory)


def stage(files: Sequence[ToStage], reader: BodyReader, *, directory: str) -> Sealed:
    """Make files durable under temporary names, all or none. No collectives; what goes wrong is in the answer.

    The data files that this rank has written have their names made durable as well: who sees ``.metadata`` after a
    crash must see them.
    """
    staged: list[StagedFile] = []
    path = directory
    try:
        make_names_durable(directory)
        for file in files:
            path = file.path
            staged.append(stage_file(path, chain(reader.read(file.body), (file.suffix,))))
    except Exception as error:
        discard(staged)
        if isinstance(error, PreparedFileError):
            return Sealed(follows=True, lost=str(error))
        return Sealed(follows=True, failure=f"{path} could not be written: {type(error).__name__}: {error}")
    return Sealed(follows=True, staged=tuple(staged))


def discard(staged: Sequence[StagedFile]) -> None:
    """Remove what was staged and not published; never raises. No collectives."""
    for file in staged:
        file.discard()
