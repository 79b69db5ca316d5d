"""Versions that cannot work together, found before Megatron is imported and without importing it."""

import runpy
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from megatron_ckpt_ext.errors import ConfigurationError

__all__ = ["check_nvrx"]

NVRX = "nvidia-resiliency-ext"
NVRX_NEEDED = Version("0.6.0")
NVRX_NEEDED_SINCE = Version("0.17.1")


def check_nvrx(script_folder: Path) -> None:
    """Refuse an NVRx that the Megatron of this job would die of with an ``AssertionError`` at import.

    A missing NVRx is fine, and so is a Megatron whose version cannot be told.
    """
    found = _installed(NVRX)
    megatron = _checkout_version(script_folder) or _installed("megatron-core")
    if found is None or megatron is None:
        return
    if megatron >= NVRX_NEEDED_SINCE and found < NVRX_NEEDED:
        raise ConfigurationError(
            f"{NVRX} {found} is installed, but megatron-core {megatron} stops at import below {NVRX} {NVRX_NEEDED}: "
            f"install {NVRX}>={NVRX_NEEDED} or uninstall it."
        )


def _installed(distribution: str) -> Version | None:
    """The installed version of a distribution."""
    try:
        return Version(version(distribution))
    except PackageNotFoundError:
        return None


def _checkout_version(folder: Path) -> Version | None:
    """The version of a Megatron-LM checkout in ``folder``, which wins over an installed one."""
    package_info = folder / "megatron" / "core" / "package_info.py"
    if not package_info.exists():
        return None
    return Version(runpy.run_path(str(package_info))["__version__"])
