"""State dicts of every kind that is staged, copies of them made without our code, and how they are spoiled."""

import copy
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_ckpt_ext.staging.stage import HostStager

type State = dict[str, Any]


class Labelled(torch.Tensor):
    """A subclass that adds nothing to its values."""


class Scaled(torch.Tensor):
    """Values quantized to bytes, as Transformer Engine keeps them: a wrapper that shows the dtype of its values."""

    codes: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: float) -> "Scaled":
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{func} of quantized values")

    def dequantize(self) -> torch.Tensor:
        return self.codes.float() * self.scale


@dataclass
class Box:
    """An object that nobody knows, with tensors in it."""

    tensor: torch.Tensor
    parameter: torch.nn.Parameter
    names: list[str] = field(default_factory=lambda: ["a"])


class Counter:
    """A ``Stateful`` that tells its state anew each time."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> State:
        return {"tensor": self.tensor, "nested": [self.tensor[:1]]}

    def load_state_dict(self, state_dict: State) -> None:
        raise NotImplementedError


def _tied(device: torch.device) -> State:
    weight = torch.randn(3, 3, device=device)
    return {"embedding": weight, "head": {"weight": torch.nn.Parameter(weight)}, "transposed": weight.t()}


def _overlapping(device: torch.device) -> State:
    whole = torch.randn(10, device=device)
    return {"front": whole[:6], "back": whole[4:], "same_begin": whole[:5]}


def _optimizer(device: torch.device) -> State:
    model = torch.nn.Linear(3, 2, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3, device=device)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _objects(device: torch.device) -> State:
    boxed = Box(torch.randn(3, device=device), torch.nn.Parameter(torch.randn(2, device=device)))
    return {"box": boxed, "in_a_set": [{1, 2}], "archive": io.BytesIO(b"bytes"), "none": None, "step": 7}


def _quantized(device: torch.device) -> State:
    codes = torch.arange(12, dtype=torch.uint8, device=device).view(3, 4)
    return {"a": Scaled(codes, 0.5), "b": {"c": Scaled(codes + 1, 0.25)}}


KINDS: dict[str, Callable[[torch.device], State]] = {
    "contiguous": lambda device: {"a": torch.randn(4, 3, device=device)},
    "non_contiguous": lambda device: {
        "a": torch.randn(3, 4, device=device).t(),
        "b": torch.randn(9, device=device)[::2],
    },
    "view_of_a_larger": lambda device: {"a": torch.randn(1000, device=device)[10:16].view(2, 3)},
    "zero_dim": lambda device: {"a": torch.tensor(3.5, device=device), "b": torch.tensor(7, device=device)},
    "zero_size": lambda device: {"a": torch.empty(0, 3, device=device), "b": torch.randn(5, device=device)[5:]},
    "tied": _tied,
    "overlapping": _overlapping,
    "expanded": lambda device: {"a": torch.randn(1, 3, device=device).expand(4, 3)},
    "bfloat16": lambda device: {"a": torch.randn(7, device=device).bfloat16()},
    "float8": lambda device: {"a": torch.randn(7, device=device).to(torch.float8_e4m3fn)},
    "bool": lambda device: {"a": torch.randn(7, device=device) > 0},
    "complex": lambda device: {"a": torch.randn(7, dtype=torch.complex64, device=device)},
    "conjugated": lambda device: {"a": torch.randn(7, dtype=torch.complex64, device=device).conj()},
    "negated": lambda device: {"a": torch.randn(7, dtype=torch.complex64, device=device).conj().imag},
    "parameter": lambda device: {"a": torch.nn.Parameter(torch.randn(5, device=device))},
    "not_a_leaf": lambda device: {"a": torch.randn(5, device=device, requires_grad=True) * 2},
    "subclass": lambda device: {"a": torch.randn(5, device=device).as_subclass(Labelled)},
    "quantized": _quantized,
    "sparse": lambda device: {
        "a": torch.eye(3, device=device).to_sparse(),
        "b": [torch.eye(3, device=device).to_sparse_csr()],
    },
    "containers": lambda device: {
        "a": [torch.randn(2, device=device), (torch.ones(1, device=device), {0: 1})],
        "b": {},
    },
    "optimizer": _optimizer,
    "objects": _objects,
    "stateful": lambda device: {"counter": Counter(torch.randn(3, device=device))},
}


def every_kind(device: torch.device) -> State:
    """All of them in one, which can be nested; a ``Stateful`` is one at the top only."""
    return {name: make(device) for name, make in KINDS.items() if name != "stateful"}


def reference(value: Any) -> Any:
    """Copy a state dict at once and without our code, on the device where it is."""
    if isinstance(value, Counter):
        return reference(value.state_dict())
    if isinstance(value, Mapping):
        return {key: reference(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(reference(each) for each in value)
    if isinstance(value, Scaled):
        return value.dequantize()
    if isinstance(value, DTensor):
        return reference(value.to_local())
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def spoil(state: Any) -> None:
    """Invert every byte of every tensor, whatever it is a view of, as often as it is found."""
    for tensor in {storage.data_ptr(): storage for storage in map(_storage, tensors(state))}.values():
        tensor.bitwise_not_()


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor with a storage in a state dict, the insides of the known kinds too."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, Box):
        yield from (value.tensor, value.parameter)
    elif isinstance(value, Counter):
        yield value.tensor
    elif isinstance(value, Scaled):
        yield value.codes
    elif isinstance(value, DTensor):
        yield value.to_local().detach()
    elif isinstance(value, torch.Tensor):
        yield from (
            [value]
            if value.layout == torch.strided
            else [value.values() if value.layout == torch.sparse_csr else value._values()]
        )


def differences(staged: Any, expected: Any, path: str = "") -> list[str]:
    """Places where a staged state dict is not the expected one, bit for bit and type for type, or not on the host."""
    if isinstance(expected, dict):
        if not isinstance(staged, dict) or staged.keys() != expected.keys():
            return [f"{path} has other keys"]
        return [text for key in expected for text in differences(staged[key], expected[key], f"{path}.{key}")]
    if type(expected) in (list, tuple):
        if type(staged) is not type(expected) or len(staged) != len(expected):
            return [f"{path} is another sequence"]
        pairs = enumerate(zip(staged, expected, strict=True))
        return [text for index, pair in pairs for text in differences(*pair, f"{path}.{index}")]
    if isinstance(expected, Box):
        return differences(vars(staged), vars(expected), path) if staged is not expected else [f"{path} is not copied"]
    if isinstance(expected, torch.Tensor):
        return [] if _same_bits(staged, expected) else [f"{path}: {staged} is not {expected}"]
    if isinstance(expected, io.BytesIO):
        return [] if staged.getvalue() == expected.getvalue() else [f"{path} has other bytes"]
    return [] if staged == expected else [f"{path}: {staged} is not {expected}"]


def _same_bits(staged: Any, expected: torch.Tensor) -> bool:
    local = staged.to_local() if isinstance(staged, DTensor) else staged
    if local.device.type != "cpu" or (local.dtype, local.shape) != (expected.dtype, expected.shape):
        return False
    return torch.equal(_bits(local), _bits(expected))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return dense.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def stage_twice(stager: HostStager, state: State) -> list[str]:
    """Where the copies differ from what was there: of a cold and of a warm save, spoiled right behind ``stage``."""
    found = []
    for _ in range(2):
        expected = reference(state)
        staged = stager.stage(state)
        staged.fence()
        spoil(state)
        staged.wait()
        found += differences(staged.state, expected)
        staged.release()
    return found
