"""The layout guard as a pure function: random layouts, random changes, no false alarm and no miss."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ckpt_ext.compat.dcp import StorageInfo
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.guard import Drift, find_held_drift, find_layout_drift, find_unknown_item, places_digest
from megatron_ckpt_ext.metadata.items import OBJECT, describe_tensor, merge_descriptions, places_of
from megatron_ckpt_ext.metadata.layout import Item, Locator, Slice
from megatron_ckpt_ext.metadata.prepared import PreparedMetadata

OFFSETS = st.none() | st.lists(st.integers(0, 8), max_size=3).map(tuple)
ITEMS = st.builds(Item, st.text("abc./_0", min_size=1, max_size=6), OFFSETS)
LOCATORS = st.builds(
    Locator,
    st.sampled_from(["__0_0.distcp", "__0_1.distcp", "__1_0.distcp"]),
    st.integers(0, 300),
    st.integers(0, 300),
)
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.uint8])
SHAPES = st.lists(st.integers(1, 6), max_size=3)
DESCRIPTIONS = st.just(OBJECT) | st.builds(describe_tensor, DTYPES, SHAPES, SHAPES)
LAYOUTS = st.dictionaries(ITEMS, LOCATORS, max_size=8)
HOLDINGS = st.dictionaries(ITEMS, DESCRIPTIONS, max_size=8)


def slice_of(locators: Mapping[Item, Locator]) -> Slice:
    return Slice(rank=0, locators=locators, held=None)


def shuffled[K, V](mapping: Mapping[K, V]) -> dict[K, V]:
    """The same content in the opposite order."""
    return dict(reversed(list(mapping.items())))


@given(LAYOUTS)
def test_an_equal_layout_is_never_refused(layout: dict[Item, Locator]) -> None:
    assert find_layout_drift(slice_of(layout), shuffled(layout)) is None


@given(HOLDINGS)
def test_an_equal_holding_is_never_refused(held: dict[Item, str]) -> None:
    assert find_held_drift(held, shuffled(held)) is None


@given(HOLDINGS, HOLDINGS)
def test_holding_less_than_the_whole_job_is_never_refused(held: dict[Item, str], others: dict[Item, str]) -> None:
    assert find_unknown_item({**others, **held}, held) is None


@given(LAYOUTS, LAYOUTS)
def test_a_layout_is_accepted_only_if_it_is_equal(expected: dict[Item, Locator], written: dict[Item, Locator]) -> None:
    check_drift(find_layout_drift(slice_of(expected), written), expected, written)


@given(HOLDINGS, HOLDINGS)
def test_a_holding_is_accepted_only_if_it_is_equal(expected: dict[Item, str], held: dict[Item, str]) -> None:
    check_drift(find_held_drift(expected, held), expected, held)


@given(HOLDINGS, HOLDINGS)
def test_an_item_is_known_only_as_it_is_described(known: dict[Item, str], held: dict[Item, str]) -> None:
    drift = find_unknown_item(known, held)

    unknown = dict(held.items() - known.items())
    assert (drift is None) == (not unknown)
    if drift is not None:
        assert drift.found == unknown[drift.item]
        assert drift.prepared == known.get(drift.item)


@given(LAYOUTS, LAYOUTS, st.randoms(use_true_random=False))
def test_digests_are_equal_exactly_if_nothing_differs(
    expected: dict[Item, Locator], written: dict[Item, Locator], random: Random
) -> None:
    in_any_order = list(expected.items())
    random.shuffle(in_any_order)

    assert places_digest(dict(in_any_order)) == places_digest(expected)
    assert (places_digest(written) == places_digest(expected)) == (written == expected)
    assert places_of(results_of(written)) == written
    assert places_digest(places_of(results_of(written))) == places_digest(written)


def results_of(layout: Mapping[Item, Locator]) -> list[WriteResult]:
    return [
        WriteResult(
            index=MetadataIndex(item.fqn, item.offset, index=7),
            size_in_bytes=locator.length,
            storage_data=StorageInfo(locator.path, locator.offset, locator.length),
        )
        for item, locator in layout.items()
    ]


def check_drift(drift: Drift | None, expected: Mapping[Item, object], found: Mapping[Item, object]) -> None:
    """A difference is reported if and only if there is one, and what is reported is one."""
    assert (drift is None) == (expected == found)
    if drift is not None:
        sides = [None if side.get(drift.item) is None else str(side[drift.item]) for side in (expected, found)]
        assert sides == [drift.prepared, drift.found]
        assert drift.prepared != drift.found
        assert str(drift.item) in str(drift)
        assert (drift.prepared or "nothing") in str(drift)
        assert (drift.found or "nothing") in str(drift)


type Layout = dict[Item, Locator]


def longer(layout: Layout, item: Item) -> Layout:
    return layout | {item: layout[item]._replace(length=layout[item].length + 1)}


def later(layout: Layout, item: Item) -> Layout:
    return layout | {item: layout[item]._replace(offset=layout[item].offset + 1)}


def elsewhere(layout: Layout, item: Item) -> Layout:
    return layout | {item: layout[item]._replace(path="__9_0.distcp")}


def gone(layout: Layout, item: Item) -> Layout:
    return {other: locator for other, locator in layout.items() if other != item}


def renamed(layout: Layout, item: Item) -> Layout:
    return gone(layout, item) | {Item(item.fqn + "!", item.offset): layout[item]}


def at_another_offset(layout: Layout, item: Item) -> Layout:
    return gone(layout, item) | {Item(item.fqn, (*(item.offset or ()), 99)): layout[item]}


def doubled(layout: Layout, item: Item) -> Layout:
    return layout | {Item(item.fqn + "!", item.offset): layout[item]}


CHANGES = [longer, later, elsewhere, gone, renamed, at_another_offset, doubled]


@pytest.mark.parametrize("change", CHANGES)
@settings(max_examples=40)
@given(layout=LAYOUTS.filter(bool), data=st.data())
def test_one_change_is_seen_from_both_sides(
    change: Callable[[Layout, Item], Layout], layout: Layout, data: st.DataObject
) -> None:
    changed = change(layout, data.draw(st.sampled_from(sorted(layout, key=str))))

    check_drift(find_layout_drift(slice_of(layout), changed), layout, changed)
    check_drift(find_layout_drift(slice_of(changed), layout), changed, layout)


@settings(max_examples=40)
@given(layout=LAYOUTS.filter(lambda layout: len(set(layout.values())) > 1))
def test_two_items_in_each_others_place_are_seen(layout: Layout) -> None:
    ordered = sorted(layout, key=str)
    one = ordered[0]
    other = next(item for item in ordered if layout[item] != layout[one])
    swapped = layout | {one: layout[other], other: layout[one]}

    drift = find_layout_drift(slice_of(layout), swapped)

    assert drift is not None
    assert drift.item in {one, other}


def test_an_item_that_grew_is_named_and_not_the_ones_it_pushed() -> None:
    layout = {
        Item("zz grows", None): Locator("__0_0.distcp", 0, 64),
        Item("a follows", (0,)): Locator("__0_0.distcp", 64, 100),
        Item("b follows", (0,)): Locator("__0_0.distcp", 164, 100),
    }
    pushed = {
        Item("zz grows", None): Locator("__0_0.distcp", 0, 128),
        Item("a follows", (0,)): Locator("__0_0.distcp", 128, 100),
        Item("b follows", (0,)): Locator("__0_0.distcp", 228, 100),
    }

    drift = find_layout_drift(slice_of(layout), pushed)

    assert str(drift) == (
        "zz grows does not match the prepared metadata: prepared __0_0.distcp[0:64], found __0_0.distcp[0:128]"
    )


def test_an_item_that_is_gone_is_named_and_not_the_ones_behind_it() -> None:
    layout = {
        Item("zz leaves", (0, 0)): Locator("__0_0.distcp", 0, 64),
        Item("a follows", (0,)): Locator("__0_0.distcp", 64, 100),
    }
    closed_up = {Item("a follows", (0,)): Locator("__0_0.distcp", 0, 100)}

    drift = find_layout_drift(slice_of(layout), closed_up)

    assert str(drift) == (
        "zz leaves at offset [0, 0] does not match the prepared metadata: prepared __0_0.distcp[0:64], found nothing"
    )


def test_a_rank_that_wrote_nothing_drifts() -> None:
    layout = {Item("weight", (0,)): Locator("__0_0.distcp", 0, 64)}

    assert find_layout_drift(slice_of(layout), {}) is not None
    assert find_layout_drift(slice_of({}), {}) is None


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (describe_tensor(torch.float32, [2, 6], [2, 6]), describe_tensor(torch.float32, [6, 2], [6, 2])),
        (describe_tensor(torch.float16, [2, 6], [2, 6]), describe_tensor(torch.bfloat16, [2, 6], [2, 6])),
        (describe_tensor(torch.float32, [2, 6], [2, 6]), describe_tensor(torch.float32, [2, 6], [4, 6])),
        (describe_tensor(torch.float32, [12], [12]), describe_tensor(torch.float32, [1, 2], [1, 2])),
        (describe_tensor(torch.float32, [], []), describe_tensor(torch.float32, [1], [1])),
        (describe_tensor(torch.uint8, [1], [1]), OBJECT),
    ],
    ids=["transposed", "same_size_dtype", "other_whole", "other_rank", "scalar", "object"],
)
def test_what_decides_the_bytes_is_described(left: str, right: str) -> None:
    item = Item("weight", (0,))

    assert find_held_drift({item: left}, {item: right}) is not None
    assert find_unknown_item({item: left}, {item: right}) is not None


@given(
    st.lists(st.tuples(ITEMS, DESCRIPTIONS), max_size=6).flatmap(lambda p: st.tuples(st.just(p), st.permutations(p)))
)
def test_descriptions_merge_in_any_order(
    orders: tuple[list[tuple[Item, str]], list[tuple[Item, str]]],
) -> None:
    one, other = (merge_descriptions(pairs) for pairs in orders)

    assert one == other
    assert sum(text.count(" + ") + 1 for text in one.values()) == len(orders[0])


@given(HOLDINGS, LAYOUTS)
def test_a_slice_survives_the_file(held: dict[Item, str], layout: Layout) -> None:
    own = Slice(rank=3, locators=layout, held=held)

    for each in (own, replace(own, held=None)):
        assert Slice.from_json(each.to_json()) == each


def test_without_a_held_list_the_whole_job_is_asked() -> None:
    item, other = Item("weight", (0,)), Item("bias", (0,))
    plain = PreparedMetadata(fingerprint=Fingerprint(), slice=slice_of({}), known={item: "float32 2 of 2"})

    assert plain.held_drift({item: "float32 2 of 2"}) is None
    assert plain.held_drift({}) is None
    drift = plain.held_drift({item: "float32 2 of 2", other: OBJECT})
    assert drift is not None
    assert drift.item == other


def saved_length(value: object) -> int:
    """Bytes that one item takes, as the writer serializes it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.tell()


@settings(max_examples=25)
@given(st.lists(st.binary(min_size=257, max_size=257), min_size=2, max_size=4))
def test_the_length_of_a_uint8_tensor_does_not_depend_on_its_values(contents: list[bytes]) -> None:
    tensors = [torch.tensor(list(content), dtype=torch.uint8) for content in contents]

    assert len({saved_length(tensor) for tensor in tensors}) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"step": [2**8 - 1] * 64}, {"step": [2**8] * 64}),
        ({"step": [2**16 - 1] * 64}, {"step": [2**16] * 64}),
        ({"path": "step_9"}, {"path": "step_10" * 32}),
    ],
    ids=["step_over_255", "step_over_65535", "text"],
)
def test_the_length_of_an_object_depends_on_its_values(before: object, after: object) -> None:
    assert saved_length([before]) < saved_length([after])
