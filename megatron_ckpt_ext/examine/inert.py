"""Reading the structure of a pickle of ``torch.save`` without running anything that it names, and without torch.

Every name in the pickle becomes an inert class that takes any arguments and does nothing. The form of a tensor is
that of ``torch._utils._rebuild_tensor_v2`` and ``_rebuild_tensor_v3`` in torch 2.14: storage, offset, size, stride, and
in the latter the dtype; a storage is ``("storage", its type, key, device, number of elements)``.
"""

import io
import pickle
from typing import Any, NamedTuple

__all__ = ["TensorForm", "tensor_form"]

_REBUILDS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


class TensorForm(NamedTuple):
    """What a pickled tensor says of itself."""

    dtype: str | None
    """Without ``torch.``; ``None`` if its storage does not tell."""
    size: tuple[int, ...]
    """Elements along each dimension."""


class _Inert:
    """An instance of any class: it keeps what it was made of, and takes whatever a pickle does to it."""

    name = ""

    def __init__(self, *args: Any, **_options: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, value: Any) -> None: ...
    def extend(self, values: Any) -> None: ...
    def add(self, value: Any) -> None: ...

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class _Structure(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        return type("_Named", (_Inert,), {"name": global_name})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def tensor_form(data: bytes) -> TensorForm | None:
    """Read a pickle; return the form of the tensor that it is, or ``None`` if it is something else. No code is run.

    Raises:
        ValueError: it is no pickle.
    """
    try:
        loaded = _Structure(io.BytesIO(data)).load()
    except Exception as error:  # whatever bytes there are
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return _form(loaded)


def _form(loaded: Any) -> TensorForm | None:
    if not isinstance(loaded, _Inert):
        return None
    if loaded.name == "_rebuild_parameter" and loaded.args:
        return _form(loaded.args[0])
    if loaded.name not in _REBUILDS or len(loaded.args) < 4:
        return None
    storage, _offset, size = loaded.args[:3]
    if not isinstance(size, tuple) or not all(isinstance(extent, int) for extent in size):
        return None
    named = next((each for each in loaded.args[4:] if isinstance(each, type) and issubclass(each, _Inert)), None)
    kind = storage[1] if isinstance(storage, tuple) and len(storage) > 1 else None
    if loaded.name == "_rebuild_tensor_v3" and named is not None:
        return TensorForm(named.name, size)
    return TensorForm(_STORAGES.get(getattr(kind, "name", "")), size)
