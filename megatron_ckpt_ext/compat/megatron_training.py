"""Names of megatron.training that the integration replaces or reads, and the versions they were read in.

Megatron has no plug-in point for any of this, so names are replaced in the modules that look them up at call time
(read in megatron-core 0.19.2). ``tests/test_compat_training.py`` notices when one of them moves.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from packaging.version import InvalidVersion, Version

__all__ = [
    "LOAD_BASE",
    "nvrx_version",
    "unfinalized_saves",
    "unsupported_megatron",
    "unsupported_nvrx",
    "unsupported_reason",
]

SUPPORTED_MEGATRON: Final = ("0.19", "0.20")
"""From this version on, and below that one."""
SUPPORTED_NVRX: Final = ("0.7", "0.8")
LOAD_BASE: Final = "_load_base_checkpoint"
"""In ``checkpointing``: reads the common part of a checkpoint, or ends the process where there is none."""


def unsupported_reason() -> str | None:
    """Say why the installed versions are not supported, or ``None``. Imports nothing of NVRx."""
    return unsupported_megatron() or unsupported_nvrx(nvrx_version())


def unsupported_megatron() -> str | None:
    """Say why the installed Megatron is not supported, whatever there is of NVRx; or ``None``."""
    import megatron.core

    return _unsupported("megatron-core", megatron.core.__version__, SUPPORTED_MEGATRON)


def unsupported_nvrx(found: str | None) -> str | None:
    """Say why a version of NVRx is not supported, or ``None``.

    Args:
        found: of ``nvrx_version``.
    """
    if found is None:
        return "nvidia-resiliency-ext is not installed"
    return _unsupported("nvidia-resiliency-ext", found, SUPPORTED_NVRX)


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


def _unsupported(name: str, found: str, bounds: tuple[str, str]) -> str | None:
    lowest, above = map(Version, bounds)
    try:
        fits = lowest <= Version(found) < above
    except InvalidVersion:  # of a fork
        fits = False
    return None if fits else f"{name} {found} is installed, {lowest} or later, below {above}, is needed"
