"""How a ``.metadata`` was made, kept in it: one line of ``StorageMeta.modules``, which no reader looks at."""

from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta

__all__ = ["provenance_of", "with_provenance"]

_MARK = "megatron-ckpt-ext: "


def with_provenance(storage_meta: StorageMeta | None, how: str) -> StorageMeta | None:
    """Return it with a line that says how the save got its layout. No collectives.

    Args:
        storage_meta: of the save; ``None`` for a writer that keeps none.
        how: for people.
    """
    if storage_meta is None:
        return None
    return replace(storage_meta, modules=[*storage_meta.modules, _MARK + how])


def provenance_of(storage_meta: Any) -> str | None:
    """Return the line of a save of this package, from untrusted data; ``None`` if there is none."""
    lines = getattr(storage_meta, "modules", None)
    found = [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
    return next((line.removeprefix(_MARK) for line in found if line.startswith(_MARK)), None)
