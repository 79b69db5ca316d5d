"""Whether a prepared file is sound: every checksum, and that the parts of the ranks make up the whole."""

from collections.abc import Iterator

from megatron_ckpt_ext.errors import PreparedFileError
from megatron_ckpt_ext.metadata.container import Container
from megatron_ckpt_ext.metadata.layout import Item, Locator, Slice
from megatron_ckpt_ext.publish.recorded import RecordedLayout

__all__ = ["find_section_faults"]


def find_section_faults(path: str, layout: RecordedLayout) -> Iterator[str]:
    """Compare the sections of all ranks with the layout in front of them; a plain file has none. No collectives.

    Args:
        path: the file.
        layout: what ``read_layout_file`` read.
    """
    try:
        with Container.open(path) as file:
            if not file.has_trailer:
                return
            file.header()
            placed: dict[Item, Locator] = {}
            for rank in range(file.world_size):
                own = Slice.from_json(file.section(rank))
                if own.rank != rank:
                    yield f"the section of rank {rank} is one of rank {own.rank}"
                placed |= own.locators
    except (PreparedFileError, OSError) as error:
        yield str(error)
        return
    for item in sorted(placed.keys() ^ layout.places.keys(), key=str):
        where = "in the section of a rank only" if item in placed else "in no section of a rank"
        yield f"item {str(item)!r} is {where}"
    for item, place in placed.items():
        if layout.places.get(item, place) != place:
            yield f"item {str(item)!r} is at {place} for its rank, and at {layout.places[item]} in the layout"
