"""What of megatron.training and NVRx is installed, and whether it is what the integration needs.

Symbols decide, and not versions: a release that has not been seen yet works if it has what is needed.
``tests/test_compat_training.py`` notices when something moves.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from packaging.version import InvalidVersion, Version

from megatron_ckpt_ext.compat.megatron_sites import FSDP_SITES, SITES, Site, find_sites

__all__ = [
    "nvrx_version",
    "unfinalized_saves",
    "unsupported_fsdp",
    "unsupported_megatron",
    "unsupported_nvrx",
    "unsupported_reason",
]

OLDEST_NVRX: Final = "0.6"
"""Megatron refuses to be imported with an older one; what a newer one has is found out by importing it."""


def unsupported_reason() -> str | None:
    """Say why the installed versions are not supported, or ``None``. Imports nothing of NVRx."""
    return unsupported_megatron() or unsupported_nvrx(nvrx_version())


def unsupported_megatron() -> str | None:
    """Say why the importable Megatron is not supported, whatever there is of NVRx; or ``None``. Imports it."""
    try:
        import megatron_ckpt_ext.compat.mcore  # noqa: F401
    except ImportError as error:
        return f"megatron-core does not have what is needed ({error})"
    return _without(SITES)


def unsupported_fsdp() -> str | None:
    """Say why ``fsdp_dtensor`` of the importable Megatron is not supported, or ``None``. Imports it."""
    return _without(FSDP_SITES)


def unsupported_nvrx(found: str | None) -> str | None:
    """Say why a version of NVRx is not supported, or ``None``. Imports nothing of it.

    Args:
        found: of ``nvrx_version``.
    """
    if found is None:
        return "nvidia-resiliency-ext is not installed"
    try:
        fits = Version(found) >= Version(OLDEST_NVRX)
    except InvalidVersion:  # of a fork
        fits = True
    return None if fits else f"nvidia-resiliency-ext {found} is installed, {OLDEST_NVRX} or later is needed"


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


def _without(known: Mapping[str, tuple[tuple[Site, ...], ...]]) -> str | None:
    import megatron.core

    _, missing = find_sites(known)
    if not missing:
        return None
    return f"megatron-core {megatron.core.__version__} is installed, and has no {', no '.join(missing)}"
