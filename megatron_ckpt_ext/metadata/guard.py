"""The layout guard: does what a rank holds and wrote equal its slice, in both directions?

Pure functions. A digest tells that nothing differs, where the slice is not at hand; the others return the first
difference in a stable order, or ``None``. The cost grows with the items of one rank, not with the size of the job.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ckpt_ext.metadata.layout import Item, Locator, Slice

__all__ = ["Drift", "find_held_drift", "find_layout_drift", "find_unknown_item", "places_digest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """One difference between the prepared metadata and a save."""

    item: Item
    """The item that differs."""
    prepared: str | None
    """Locator or description in the prepared metadata; ``None``: the item is not there."""
    found: str | None
    """Locator or description in this save; ``None``: the item is not there."""

    def __str__(self) -> str:
        """Say what differs, in one sentence."""
        return (
            f"{self.item} does not match the prepared metadata: "
            f"prepared {self.prepared or 'nothing'}, found {self.found or 'nothing'}"
        )


def places_digest(places: Mapping[Item, Locator]) -> bytes:
    """Digest items and their places, whatever their order: threads of a writer finish as they like. No collectives."""
    plain = sorted(
        repr((path, start, length, fqn, None if offset is None else tuple(offset)))
        for (fqn, offset), (path, start, length) in places.items()
    )
    return hashlib.blake2b("\n".join(plain).encode(), digest_size=16).digest()


def find_layout_drift(expected: Slice, written: Mapping[Item, Locator]) -> Drift | None:
    """Compare what a rank wrote with everything its slice places in the rank's files.

    No collectives. Both directions: an item written elsewhere, and an item that nobody wrote; the second also
    on a rank that wrote nothing at all.
    """
    return _first_difference(expected.locators, written)


def find_held_drift(expected: Mapping[Item, str], held: Mapping[Item, str]) -> Drift | None:
    """Compare the items a rank holds, written by it or not, with those it held at create time.

    No collectives. An item that is new on every rank and written by none (a replica of a shard that the save
    distribution does not know) shows up here only.
    """
    return _first_difference(expected, held)


def find_unknown_item(known: Mapping[Item, str], held: Mapping[Item, str]) -> Drift | None:
    """Find an item a rank holds that the whole layout lacks or describes otherwise; for a plain ``Metadata``."""
    unknown = [item for item, text in held.items() if known.get(item) != text]
    if not unknown:
        return None
    item = min(unknown, key=str)
    return Drift(item=item, prepared=known.get(item), found=held[item])


def _first_difference(
    expected: Mapping[Item, Locator] | Mapping[Item, str], found: Mapping[Item, Locator] | Mapping[Item, str]
) -> Drift | None:
    if expected == found:
        return None
    differing = [item for item in expected.keys() | found.keys() if expected.get(item) != found.get(item)]
    item = min(differing, key=lambda item: (_was_pushed(expected.get(item), found.get(item)), str(item)))
    return Drift(item=item, prepared=_text(expected.get(item)), found=_text(found.get(item)))


def _was_pushed(expected: Locator | str | None, found: Locator | str | None) -> bool:
    """Whether an item only lies elsewhere; the one that grew, came or went in front of it is the one to name."""
    return isinstance(expected, Locator) and isinstance(found, Locator) and expected.length == found.length


def _text(value: Locator | str | None) -> str | None:
    return None if value is None else str(value)
