"""Where Megatron looks up the names that are replaced, in each release that is known.

Megatron has no plug-in point for any of this, so a name is replaced in the module of a function that looks it up each
time it runs. Releases move names; what is found decides, and not a version. Read in megatron-core 0.17.1, 0.18.2 and
0.19.2, and in Megatron-LM's main of August 2026. ``tests/test_compat_training.py`` notices when one of them moves.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, ModuleType
from typing import Any

from megatron_ckpt_ext.replacements import Replacement

__all__ = ["FSDP_SITES", "SITES", "Site", "find_sites"]


@dataclass(frozen=True, slots=True)
class Site:
    """A name of a module, and a function of that module which looks it up when it runs."""

    module: str
    name: str
    user: str
    package: str = "megatron.training"

    def __str__(self) -> str:
        """Describe it as in a sentence."""
        return f"{self.module}.{self.name} in {self.user}"

    @property
    def owner(self) -> ModuleType:
        """The module. Imports it."""
        return import_module(f"{self.package}.{self.module}")

    def replaced(self, wrap: Callable[[Any], Any]) -> Replacement:
        """Return the replacement of the name by what ``wrap`` makes of it."""
        return self.owner, self.name, wrap(getattr(self.owner, self.name))

    def is_there(self) -> bool:
        """Whether the function looks the name up in its module. Imports the module."""
        try:
            owner = self.owner
        except ImportError:
            return False
        function = inspect.unwrap(getattr(owner, self.user, _absent))
        code = getattr(function, "__code__", None)
        looks_up = code is not None and self.name in _global_names(code)
        return looks_up and hasattr(owner, self.name) and function.__globals__ is vars(owner)


SITES: dict[str, tuple[tuple[Site, ...], ...]] = {
    "flags": ((Site("arguments", "add_megatron_arguments", "parse_args"),),),
    "validation": (
        (Site("arguments", "validate_args", "parse_and_validate_args"),),
        (Site("initialize", "validate_args", "initialize_megatron"),),  # 0.17
    ),
    "start": ((Site("training", "initialize_megatron", "pretrain"),),),
    "save": ((Site("training", "save_checkpoint", "save_checkpoint_and_time"),),),
    "tracker": (
        (Site("checkpointing", "maybe_msc", "save_checkpoint"),),
        (Site("checkpointing", "open_file", "save_checkpoint"),),  # before 0.19
    ),
    "tracker reader": (
        (
            Site("checkpointing", "read_metadata", "_load_base_checkpoint"),
            Site("checkpointing", "read_metadata", "get_load_checkpoint_path_by_args"),
        ),
    ),
    "loader": (
        (
            Site("checkpointing", "_load_base_checkpoint", "load_checkpoint"),
            Site("checkpointing", "_load_base_checkpoint", "load_args_from_checkpoint"),
        ),
    ),
    "clean-up": ((Site("checkpointing", "cleanup_old_non_persistent_checkpoint", "save_checkpoint"),),),
    "strategy": ((Site("checkpointing", "TorchDistSaveShardedStrategy", "save_checkpoint"),),),
    "wrapper": ((Site("checkpointing", "FullyParallelSaveStrategyWrapper", "save_checkpoint"),),),
    "dist_checkpointing": ((Site("checkpointing", "dist_checkpointing", "save_checkpoint"),),),
    "schedule": ((Site("checkpointing", "schedule_async_save", "save_checkpoint"),),),
    "queue": (
        (
            Site("async_utils", "get_async_strategy", "init_persistent_async_worker"),
            Site("async_utils", "get_async_strategy", "_get_async_calls_queue"),
        ),
    ),
    "finalize": (
        (
            Site("training", "maybe_finalize_async_save", "train"),
            Site("training", "maybe_finalize_async_save", "pretrain"),
        ),
    ),
}
"""What is replaced -> alternatives, the newest first; each alternative is every place where it has to be looked up."""

FSDP_SITES = {
    "state": (
        (Site("checkpointing", "preprocess_state_dict_for_uneven_dtensor", "preprocess_fsdp_dtensor_state_dict"),),
    ),
    "strategy": ((Site("checkpointing", "get_async_strategy", "save_checkpoint"),),),
    "finalize": ((Site("checkpointing", "get_save_and_finalize_callbacks", "save_checkpoint"),),),
}
"""The same for ``fsdp_dtensor``; Megatron lacks the first one where it cannot import Megatron-FSDP."""


def find_sites(known: Mapping[str, tuple[tuple[Site, ...], ...]]) -> tuple[dict[str, Site], list[str]]:
    """Find where each name is looked up. Imports ``megatron.training``; no collectives.

    Args:
        known: ``SITES`` or ``FSDP_SITES``.

    Returns:
        What is replaced -> the place; and for each one that is nowhere, what was looked for.
    """
    found: dict[str, Site] = {}
    missing: list[str] = []
    for key, alternatives in known.items():
        fitting = next((sites for sites in alternatives if all(site.is_there() for site in sites)), None)
        if fitting is None:
            missing.append(f"{key} ({' or '.join(str(sites[0]) for sites in alternatives)})")
        else:
            found[key] = fitting[0]
    return found, missing


def _absent() -> None:
    """Stands in for a function that is not there."""


def _global_names(code: CodeType) -> Iterator[str]:
    """Names that a function, or one inside it, looks up in a module or in an object."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
