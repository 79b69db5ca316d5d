"""Names of megatron.training that the integration replaces or reads, and the versions they were read in.

Megatron has no plug-in point for any of this, so names are replaced in the modules that look them up at call time
(read in megatron-core 0.19.2). ``tests/test_compat_training.py`` notices when one of them moves.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from packaging.version import Version

__all__ = ["LOAD_BASE", "nvrx_version", "unfinalized_saves", "unsupported_megatron", "unsupported_reason"]

SUPPORTED_MEGATRON: Final = ("0.19", "0.20")
"""From this version on, and below that one."""
SUPPORTED_NVRX: Final = ("0.7", "0.8")
LOAD_BASE: Final = "_load_base_checkpoint"
"""In ``checkpointing``: reads the common part of a checkpoint, or ends the process where there is none."""


def unsupported_reason() -> str | None:
    """Say why the installed versions are not supported, or ``None``."""
    if (megatron := unsupported_megatron()) is not None:
        return megatron
    nvrx = nvrx_version()
    if nvrx is None:
        return "nvidia-resiliency-ext is not installed"
    if not _within(Version(nvrx), SUPPORTED_NVRX):
        return _sentence("nvidia-resiliency-ext", Version(nvrx), SUPPORTED_NVRX)
    return None


def unsupported_megatron() -> str | None:
    """Say why the installed Megatron is not supported, whatever there is of NVRx; or ``None``."""
    import megatron.core

    megatron = Version(megatron.core.__version__)
    return None if _within(megatron, SUPPORTED_MEGATRON) else _sentence("megatron-core", megatron, SUPPORTED_MEGATRON)


def unfinalized_saves() -> int:
    """Return how many saves are in flight in Megatron's queue. No collectives."""
    from megatron.training import async_utils

    queue = async_utils._async_calls_queue
    return 0 if queue is None else int(queue.get_num_unfinalized_calls())


def nvrx_version() -> str | None:
    """Return the installed version of NVRx, if any."""
    try:
        return version("nvidia-resiliency-ext")
    except PackageNotFoundError:
        return None


def _within(found: Any, bounds: tuple[str, str]) -> bool:
    return bool(Version(bounds[0]) <= found < Version(bounds[1]))


def _sentence(name: str, found: Version, bounds: tuple[str, str]) -> str:
    return f"{name} {found} is not between {bounds[0]} and {bounds[1]}, the versions it was tested with"
