"""Jobs on a machine with another NVRx: sources for ``sitecustomize``, which Python runs first in each process."""

__all__ = ["WITHOUT_NVRX", "WITH_BROKEN_NVRX", "nvrx_of_version"]

_DISTRIBUTION = "nvidia-resiliency-ext"
WITH_BROKEN_NVRX = """
import sys
sys.modules["nvidia_resiliency_ext"] = None
"""
"""Installed, and every import of it fails."""
WITHOUT_NVRX = f"""{WITH_BROKEN_NVRX}
import importlib.metadata
installed = importlib.metadata.version
def version(name):
    if name == "{_DISTRIBUTION}":
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)
importlib.metadata.version = version
"""
"""Not installed."""


def nvrx_of_version(version: str) -> str:
    """Return the source for a machine whose NVRx says that it is of this version; what it can do stays."""
    return f"""
import importlib.metadata
installed = importlib.metadata.version
importlib.metadata.version = lambda name: "{version}" if name == "{_DISTRIBUTION}" else installed(name)
"""
