"""A stand-in for transformer_engine: Megatron-Bridge imports it, and it is not built for machines without CUDA."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["install_unless_there"]

NAME = "transformer_engine"
IMPORTED_BEFORE = ("extensions.transformer_engine", "optimizer", "models.gpt.gpt_layer_specs")
"""Parts of megatron.core that look for the package and do without: with the stand-in they would take it for real."""


class _AnyClass(type):
    """Classes whose attributes are classes of any name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (), {})


class _AnyModule(ModuleType):
    """A module that has whatever is asked of it: Bridge names these things and, on the CPU, uses none of them."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == NAME else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _AnyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def install_unless_there() -> None:
    """Let ``import transformer_engine`` find something. To be called before megatron.bridge is imported."""
    if find_spec(NAME) is None:
        for name in IMPORTED_BEFORE:
            import_module(f"megatron.core.{name}")
        sys.meta_path.append(_Finder())
