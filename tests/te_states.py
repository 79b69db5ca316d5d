"""What Transformer Engine puts into a state dict, without it: extra state in each encoding, quantized tensors.

Functions named ``*_on_rank`` run inside a rank of the pool.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch.utils._pytree import tree_map

__all__ = ["ENCODINGS", "Layer", "Quantized", "extra_states"]

BLOCK = 4
"""Values that share a scale in ``Quantized``, as in a block-wise recipe."""


def _bytes(state: Any) -> torch.Tensor:
    """As Transformer Engine encodes since 2.0."""
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def _archive(state: Any) -> io.BytesIO:
    """As it did before."""
    archive = io.BytesIO()
    torch.save(state, archive)
    return archive


def _decoded(encoded: Any) -> Any:
    """As megatron-core and Transformer Engine decode: an empty tensor, and none, say that there is no state."""
    if encoded is None or (isinstance(encoded, torch.Tensor) and encoded.numel() == 0):
        return None
    if isinstance(encoded, torch.Tensor):
        return pickle.loads(encoded.numpy().tobytes())
    encoded.seek(0)
    return torch.load(encoded)


ENCODINGS: dict[str, Callable[[Any], Any]] = {
    "uint8 tensor": _bytes,
    "BytesIO": _archive,
    "empty": lambda _state: torch.empty(0, dtype=torch.uint8),
    "none": lambda _state: None,
}


class Layer(torch.nn.Linear):
    """A layer whose extra state is a history of the largest values, which grows."""

    def __init__(self, encoding: str, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(3, 2)
        self.encode = ENCODINGS[encoding]
        self.history: list[float] | None = [float(seed)]

    def get_extra_state(self) -> Any:
        return self.encode({"amax_history": self.history, "recipe": "delayed"})

    def set_extra_state(self, state: Any) -> None:
        decoded = _decoded(state)
        self.history = None if decoded is None else decoded["amax_history"]


def extra_states(layers: dict[str, Layer]) -> dict[str, ShardedObject]:
    """What megatron-core makes of the extra state of these layers, equal on all ranks."""
    return {
        f"{name}._extra_state": make_sharded_object_for_checkpoint(
            layer.get_extra_state(), f"{name}._extra_state", replica_id=(0, 0, dist.get_rank())
        )
        for name, layer in layers.items()
    }


class Quantized(torch.Tensor):
    """Codes of a byte and a scale for each block: a wrapper that claims to be bfloat16.

    As with Transformer Engine's ``QuantizedTensor``, views stay quantized and other operations see dequantized values.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> "Quantized":
        made: Quantized = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.bfloat16, device=codes.device
        )
        made.codes, made.scales = codes, scales
        return made

    @classmethod
    def of(cls, seed: int, rows: int = 2) -> "Quantized":
        own = torch.Generator().manual_seed(seed)
        codes = torch.randint(-127, 128, (rows, 2 * BLOCK), generator=own, dtype=torch.int8)
        return cls(codes, torch.rand(rows, 2, generator=own))

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, *given: Any) -> Any:
        if func.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.view, torch.ops.aten.alias):
            return cls(given[0][0].codes, given[0][0].scales)
        args, kwargs = tree_map(lambda each: each.dequantize() if isinstance(each, cls) else each, given)
        return func(*args, **kwargs)

    def dequantize(self) -> torch.Tensor:
        return (self.codes.float() * self.scales.repeat_interleave(BLOCK, dim=1)).bfloat16()
