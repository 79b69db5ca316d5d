"""The fingerprint: every structural field is compared on its own, versions only warn, unknown values do nothing."""

import pickle
from argparse import Namespace
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from prepared_files import FINGERPRINT, layout, prepared_bytes, written

from megatron_ckpt_ext.integrations.fingerprint import fingerprint_of
from megatron_ckpt_ext.metadata.fingerprint import Fingerprint
from megatron_ckpt_ext.metadata.layout import owner_of, workers_per_rank
from megatron_ckpt_ext.metadata.prepared import FingerprintMismatchError, PreparedMetadata, plain_fingerprint

STRUCTURAL: dict[str, Any] = {
    "world_size": 3,
    "tensor_parallel": 4,
    "pipeline_parallel": 1,
    "context_parallel": 2,
    "expert_parallel": 16,
    "ckpt_format": "fsdp_dtensor",
    "workers_per_rank": 2,
    "drops_redundant_extra_state": True,
    "optimizer_sharding": "fully_reshardable",
}
"""Each structural field with a value that differs from `FINGERPRINT`."""
VERSIONS: dict[str, Any] = {"torch_version": "2.15.0", "megatron_version": "0.20.0", "nvrx_version": "0.8.0"}
ARGUMENTS: dict[str, Any] = {
    "world_size": 2,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "ckpt_format": "torch_dist",
    "dist_ckpt_workers": 2,
    "ckpt_assume_constant_structure": True,
    "use_distributed_optimizer": True,
    "dist_ckpt_optim_fully_reshardable": False,
}


def test_no_field_is_left_out_here() -> None:
    assert {field.name for field in fields(Fingerprint)} == STRUCTURAL.keys() | VERSIONS.keys()


@pytest.mark.parametrize(("field", "value"), STRUCTURAL.items(), ids=STRUCTURAL.keys())
def test_a_structural_difference_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    path = written(tmp_path / "prepared", prepared_bytes(layout(2)))
    current = replace(FINGERPRINT, **{field: value})

    with pytest.raises(FingerprintMismatchError) as caught:
        PreparedMetadata.load(path, 0, current.world_size or 0, expected=current)

    (difference,) = caught.value.differences
    assert (difference.field, difference.prepared, difference.current) == (field, getattr(FINGERPRINT, field), value)
    words = field.replace("_", " ")
    sentence = f"{words} is {value} in this job and {getattr(FINGERPRINT, field)} in the prepared metadata"
    assert sentence in str(caught.value)
    assert path in str(caught.value)
    assert "--ckpt-metadata-create" in str(caught.value)


def test_all_differences_are_named_together(tmp_path: Path) -> None:
    path = written(tmp_path / "prepared", prepared_bytes(layout(2)))

    with pytest.raises(FingerprintMismatchError) as caught:
        PreparedMetadata.load(path, 0, 3, expected=replace(FINGERPRINT, **STRUCTURAL))

    assert {difference.field for difference in caught.value.differences} == STRUCTURAL.keys()


@pytest.mark.parametrize(("field", "value"), VERSIONS.items(), ids=VERSIONS.keys())
def test_a_version_difference_is_no_structural_one(tmp_path: Path, field: str, value: Any) -> None:
    path = written(tmp_path / "prepared", prepared_bytes(layout(2)))
    current = replace(FINGERPRINT, **{field: value})

    loaded = PreparedMetadata.load(path, 0, 2, expected=current)

    (difference,) = loaded.fingerprint.version_differences(current)
    assert str(difference) == (
        f"{field.replace('_', ' ')} is {value} in this job and {getattr(FINGERPRINT, field)} in the prepared metadata"
    )


@pytest.mark.parametrize("field", STRUCTURAL.keys() - {"world_size"})
def test_an_unknown_value_on_either_side_is_not_compared(tmp_path: Path, field: str) -> None:
    unknown = replace(FINGERPRINT, **{field: None})
    differing = replace(FINGERPRINT, **{field: STRUCTURAL[field]})
    told = written(tmp_path / "told", prepared_bytes(layout(2)))
    untold = written(tmp_path / "untold", prepared_bytes(layout(2), unknown))

    PreparedMetadata.load(told, 0, 2, expected=unknown)
    loaded = PreparedMetadata.load(untold, 0, 2, expected=differing)

    assert loaded.fingerprint.unknown_structural_fields(differing) == [field]
    assert FINGERPRINT.unknown_structural_fields(unknown) == []


def test_equal_fingerprints_do_not_differ() -> None:
    assert FINGERPRINT.structural_differences(FINGERPRINT) == FINGERPRINT.version_differences(FINGERPRINT) == []
    assert FINGERPRINT.unknown_structural_fields(FINGERPRINT) == []


def test_json_keeps_every_field_and_ignores_later_ones() -> None:
    assert Fingerprint.from_json(FINGERPRINT.to_json()) == FINGERPRINT
    assert Fingerprint.from_json({**FINGERPRINT.to_json(), "of_a_later_version": 1}) == FINGERPRINT
    assert Fingerprint.from_json({}) == Fingerprint()


@pytest.mark.parametrize("hint", ["", "hint", "__7_7.distcp", "layers/7_"])
@pytest.mark.parametrize(("world_size", "workers"), [(1, 1), (2, 2), (12, 1)])
def test_a_plain_file_tells_world_size_and_workers(tmp_path: Path, hint: str, world_size: int, workers: int) -> None:
    metadata = layout(world_size, workers=workers, hint=hint)
    path = written(tmp_path / "prepared", pickle.dumps(metadata))

    loaded = PreparedMetadata.load(path, world_size - 1, world_size, expected=Fingerprint(workers_per_rank=workers))

    assert loaded.fingerprint == Fingerprint(world_size=world_size, workers_per_rank=workers)
    assert loaded.slice.locators
    with pytest.raises(FingerprintMismatchError, match="workers per rank is 5 in this job"):
        PreparedMetadata.load(path, 0, world_size, expected=Fingerprint(workers_per_rank=5))


def test_file_names_are_read_from_their_end() -> None:
    assert owner_of("hint__3_1.distcp") == 3
    assert owner_of("__9_9.distcp__3_1.distcp") == 3
    assert owner_of("dir/__12_0.distcp") == 12
    assert owner_of("model.safetensors") is owner_of("__3_1.distcp.tmp") is owner_of("_3_1.distcp") is None
    assert workers_per_rank(["hint__3_1.distcp", "__0_0.distcp", "__1_0.distcp"]) == 2
    assert workers_per_rank(["model.safetensors"]) is None


def test_a_metadata_of_nobodys_files_tells_nothing() -> None:
    metadata = layout(1)
    metadata.storage_data = {
        index: replace(info, relative_path="model.safetensors") for index, info in metadata.storage_data.items()
    }

    assert plain_fingerprint(metadata) == Fingerprint()


@pytest.mark.parametrize(
    ("argument", "value", "field", "expected"),
    [
        ("world_size", 8, "world_size", 8),
        ("tensor_model_parallel_size", 2, "tensor_parallel", 2),
        ("pipeline_model_parallel_size", 2, "pipeline_parallel", 2),
        ("context_parallel_size", 2, "context_parallel", 2),
        ("expert_model_parallel_size", 2, "expert_parallel", 2),
        ("ckpt_format", "fsdp_dtensor", "ckpt_format", "fsdp_dtensor"),
        ("dist_ckpt_workers", 4, "workers_per_rank", 4),
        ("ckpt_assume_constant_structure", False, "workers_per_rank", 1),
        ("ckpt_drop_redundant_extra_state", True, "drops_redundant_extra_state", True),
        ("drop_redundant_extra_state", True, "drops_redundant_extra_state", True),
        ("use_distributed_optimizer", False, "optimizer_sharding", "none"),
        ("dist_ckpt_optim_fully_reshardable", True, "optimizer_sharding", "fully_reshardable"),
    ],
)
def test_each_argument_of_megatron_moves_its_field_only(argument: str, value: Any, field: str, expected: Any) -> None:
    before = fingerprint_of(Namespace(**ARGUMENTS))

    after = fingerprint_of(Namespace(**{**ARGUMENTS, argument: value}))

    assert after == replace(before, **{field: expected})
    assert after != before


def test_a_layer_wise_optimizer_is_sharded_like_the_distributed_one() -> None:
    layer_wise = {"use_distributed_optimizer": False, "use_layer_wise_distributed_optimizer": True}

    assert fingerprint_of(Namespace(**ARGUMENTS)) == fingerprint_of(Namespace(**{**ARGUMENTS, **layer_wise}))


def test_megatron_settings_are_all_known() -> None:
    known = fingerprint_of(Namespace(**ARGUMENTS))

    assert [field.name for field in fields(known) if getattr(known, field.name) is None] == []
