"""Reading the bytes of a layout where they are published, and looking through those that came from outside."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.body import BodyFile
from megatron_ckpt_ext.metadata.container import Container
from megatron_ckpt_ext.metadata.items import all_locators
from megatron_ckpt_ext.metadata.layout import Item, Locator, Slice, owner_of
from megatron_ckpt_ext.metadata.pickled import load_metadata, paused_garbage_collection, with_storage_meta

__all__ = ["BodyReader"]


class BodyReader:
    """Reads bodies for one process; keeps the last that came from outside and was looked through. No collectives."""

    def __init__(self) -> None:
        """Have read nothing."""
        self._kept: tuple[BodyFile, bytes] | None = None

    def read(self, body: bytes | BodyFile) -> Iterable[bytes]:
        """Return the bytes of ``body`` in pieces.

        A file that others can write to is read once and kept: it may be replaced while the job goes on. It is published
        with every checkpoint, so what is not harmless in it is refused, and what says otherwise than the ranks' own
        sections, which are all that the ranks compare with.

        Raises:
            PreparedFileError: now or while the pieces are taken: missing, changed, damaged or hostile.
        """
        if isinstance(body, bytes):
            return (body,)
        if body.index_crc is None:
            return body.pieces()
        if self._kept is None or self._kept[0] != body:
            with paused_garbage_collection():
                self._kept = body, _looked_through(body)
        return (self._kept[1],)


def _looked_through(body: BodyFile) -> bytes:
    data = b"".join(body.pieces())
    metadata = load_metadata(data + with_storage_meta(None), origin=f"the layout in {body.path}")
    places: dict[int | None, dict[Item, Locator]] = defaultdict(dict)
    for item, locator in all_locators(metadata).items():
        places[owner_of(locator.path)][item] = locator
    with Container.open(body.path) as file:
        if file.body_file() != body:
            raise PreparedFileError(f"the layout in {body.path} is no longer the one that was followed")
        for rank in range(file.world_size):
            _compare(places.pop(rank, {}), Slice.from_json(file.section(rank)), body.path)
    if places:
        raise PreparedFileError(f"the layout in {body.path} has items in files of ranks that it has no section for")
    return data


def _compare(placed: Mapping[Item, Locator], own: Slice, path: str) -> None:
    """A section may say more: of two ranks that wrote one item, the layout names one."""
    for item, locator in placed.items():
        if own.locators.get(item) != locator:
            raise PreparedFileError(
                f"the layout in {path} has {item} in {locator}, and the section of rank {own.rank} has it elsewhere"
            )
