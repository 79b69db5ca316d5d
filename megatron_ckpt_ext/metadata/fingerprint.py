"""The fingerprint of a job: what must match between the producer and the user of a prepared metadata."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["Difference", "Fingerprint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One fingerprint field that differs."""

    field: str
    """Name of the field of ``Fingerprint``."""
    prepared: str | int | bool | None
    """Value in the prepared metadata."""
    current: str | int | bool | None
    """Value of this job."""

    def __str__(self) -> str:
        """Name the field and both values."""
        name = self.field.replace("_", " ")
        return f"{name} is {self.current} in this job and {self.prepared} in the prepared metadata"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Settings that decide a checkpoint's layout; ``None`` means unknown.

    Structural fields must be equal. Version fields only warn: the layout guard decides about those.
    """

    world_size: int | None = None
    """Number of ranks."""
    tensor_parallel: int | None = None
    """``--tensor-model-parallel-size``."""
    pipeline_parallel: int | None = None
    """``--pipeline-model-parallel-size``."""
    context_parallel: int | None = None
    """``--context-parallel-size``."""
    expert_parallel: int | None = None
    """``--expert-model-parallel-size``."""
    ckpt_format: str | None = None
    """``--ckpt-format``."""
    workers_per_rank: int | None = None
    """Largest number of files that one rank writes."""
    drops_redundant_extra_state: bool | None = None
    """Whether redundant Transformer Engine extra state is left out."""
    optimizer_sharding: str | None = None
    """Sharding type of the distributed optimizer, ``"none"`` without one."""
    torch_version: str | None = None
    """Version of torch."""
    megatron_version: str | None = None
    """Version of megatron-core."""
    nvrx_version: str | None = None
    """Version of nvidia-resiliency-ext."""

    def structural_differences(self, current: "Fingerprint") -> list[Difference]:
        """Return the structural fields that are known on both sides and differ."""
        return [difference for difference in self._differences(current) if difference.field not in _VERSIONS]

    def version_differences(self, current: "Fingerprint") -> list[Difference]:
        """Return the version fields that are known on both sides and differ."""
        return [difference for difference in self._differences(current) if difference.field in _VERSIONS]

    def unknown_structural_fields(self, current: "Fingerprint") -> list[str]:
        """Return the structural fields that ``current`` knows and this fingerprint does not."""
        return [
            field.name
            for field in fields(self)
            if field.name not in _VERSIONS
            and getattr(self, field.name) is None
            and getattr(current, field.name) is not None
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Fingerprint":
        """Read what ``to_json`` made; fields of a later format version are ignored."""
        return cls(**{field.name: data.get(field.name) for field in fields(cls)})

    def _differences(self, current: "Fingerprint") -> list[Difference]:
        pairs = ((field.name, getattr(self, field.name), getattr(current, field.name)) for field in fields(self))
        return [
            Difference(field=name, prepared=ours, current=theirs)
            for name, ours, theirs in pairs
            if ours is not None and theirs is not None and ours != theirs
        ]


_VERSIONS = frozenset({"torch_version", "megatron_version", "nvrx_version"})
