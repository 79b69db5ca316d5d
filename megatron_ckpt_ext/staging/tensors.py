"""What of a tensor is copied: its local values, dense and dequantized."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from megatron_ckpt_ext.compat.dtensor import DTensor, ShardedTensor, local_of, rewrapped
from megatron_ckpt_ext.staging.errors import StagingError

__all__ = ["KeyPath", "Leaf", "Source", "is_dense", "named", "source_of"]

type KeyPath = tuple[Hashable, ...]
"""Keys and indices that lead to a value of a state dict."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The values of one tensor, or of its shard on this rank, as they are read."""

    path: KeyPath
    """Where it was found first."""
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return self.tensor.numel() * self.tensor.dtype.itemsize

    @property
    def identity(self) -> Hashable:
        """Equal for two tensors if they show the same memory in the same way."""
        tensor = self.tensor
        if not self.owns_memory:
            return id(tensor)
        how = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        return (tensor.device, tensor.data_ptr(), how)

    @property
    def owns_memory(self) -> bool:
        """Whether it is a tensor with a storage, and not a subclass that may be made of several."""
        return type(self.tensor) in (torch.Tensor, torch.nn.Parameter)

    def values(self) -> torch.Tensor:
        """Return what is to be copied; a new tensor if it has to be dequantized.

        Raises:
            StagingError: it is dequantized to something else than its dtype and shape promise.
        """
        if not _is_quantized(self.tensor):
            # A copy between devices would conjugate before the bytes have arrived.
            return self.tensor.resolve_conj().resolve_neg()
        values: torch.Tensor = self.tensor.dequantize()
        if (values.dtype, values.shape) != (self.tensor.dtype, self.tensor.shape):
            raise StagingError(
                f"{named(self.path)} is a {_described(self.tensor)}, but dequantize() returns a {_described(values)}: "
                "dequantize it before the save"
            )
        return values


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of the state dict that has its values in a buffer."""

    source: Source
    """Tied tensors have the same."""
    dtensor: DTensor | None
    """What the source is the local shard of."""

    def around(self, host: torch.Tensor) -> torch.Tensor:
        """Return what stands for the tensor in the staged state dict."""
        # A shard of its own: where it lies may be hung on it.
        return host if self.dtensor is None else rewrapped(self.dtensor, host.view(host.shape))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be copied into a buffer. Sparse ones and the like cannot: they are copied as objects."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def source_of(path: KeyPath, tensor: torch.Tensor) -> Source:
    """Return what is to be copied of a dense tensor, of a DTensor its local shard. No collectives.

    Raises:
        StagingError: it has no values here, or is a ShardedTensor.
    """
    if isinstance(tensor, ShardedTensor):
        raise StagingError(f"{named(path)} is a ShardedTensor (FSDP1): only DTensors, tensors and objects can be saved")
    source = Source(path, local_of(tensor) if isinstance(tensor, DTensor) else tensor)
    if source.tensor.is_meta:
        raise StagingError(f"{named(path)} is on the meta device, so it has no values: materialize it before the save")
    if source.owns_memory and source.nbytes and not source.tensor.untyped_storage().nbytes():
        raise StagingError(
            f"the memory of {named(path)} is released, by an offload for instance: bring it back before the save"
        )
    return source


def named(path: KeyPath) -> str:
    """Return the path as it stands in a message."""
    return ".".join(map(str, path))


def _is_quantized(tensor: torch.Tensor) -> bool:
    """Whether its class brings a ``dequantize`` of its own, as Transformer Engine's and torchao's do."""
    return type(tensor).dequantize is not torch.Tensor.dequantize


def _described(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} of {tensor.dtype} and shape {tuple(tensor.shape)}"
