"""Jobs on a machine with another NVRx: sources for ``sitecustomize``, which Python runs first in each process."""

__all__ = ["NVRX_THAT_HAS_MOVED", "WITHOUT_NVRX", "WITH_BROKEN_NVRX", "nvrx_of_version"]

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

NVRX_THAT_HAS_MOVED = """
import importlib.abc, importlib.machinery, sys
WRITER = "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async"
class Moved(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != WRITER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            del module.FileSystemWriterAsync.register_shm_drain_callback
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Moved())
"""
"""Installed, and without a name that is used."""


def nvrx_of_version(version: str) -> str:
    """Return the source for a machine whose NVRx says that it is of this version; what it can do stays."""
    return f"""
import importlib.metadata
installed = importlib.metadata.version
importlib.metadata.version = lambda name: "{version}" if name == "{_DISTRIBUTION}" else installed(name)
"""
