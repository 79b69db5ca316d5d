"""What the megatron-core wheel leaves out of a source checkout.

Read in megatron-core 0.19.2: ``compile_helpers`` runs ``make`` in ``megatron/core/datasets`` and exits the
process when that fails; the wheel has the compiled helper there, but no Makefile. ``tests/test_launcher.py``
notices when this moves (``test_helpers_of_the_wheel_are_used``).
"""

from importlib.util import find_spec
from pathlib import Path

__all__ = ["use_shipped_dataset_helpers"]


def use_shipped_dataset_helpers() -> bool:
    """Skip the compilation where only the compiled helper is there, and return whether it is. Imports Megatron."""
    from megatron.core.datasets import utils

    has_makefile = (Path(utils.__file__).parent / "Makefile").exists()
    if has_makefile or find_spec("megatron.core.datasets.helpers_cpp") is None:
        return False
    utils.compile_helpers = _already_compiled
    return True


def _already_compiled() -> None:
    """Stands in for ``compile_helpers``."""
