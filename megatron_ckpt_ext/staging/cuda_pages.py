"""Pages of host memory, locked for CUDA."""

import torch

from megatron_ckpt_ext.staging.errors import StagingError

__all__ = ["CudaPages"]

_PORTABLE = 1  # cudaHostRegisterPortable: locked for all contexts


class CudaPages:
    """Locks memory with the context of one device; no other gets a context. No collectives."""

    def __init__(self, device: torch.device) -> None:
        """Do not touch CUDA yet."""
        self._device = device

    def lock(self, address: int, nbytes: int) -> None:
        """Lock whole pages (cudaHostRegister).

        Raises:
            StagingError: CUDA refuses.
        """
        with torch.cuda.device(self._device):
            refusal = torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)  # type: ignore[no-untyped-call]
        _check(refusal, f"{nbytes} bytes of host memory cannot be page-locked for {self._device}")

    def unlock(self, address: int) -> None:
        """Undo ``lock`` (cudaHostUnregister).

        Raises:
            StagingError: CUDA refuses.
        """
        with torch.cuda.device(self._device):
            refusal = torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        _check(refusal, f"host memory of {self._device} cannot be unlocked")


def _check(refusal: int, what: str) -> None:
    try:
        torch.cuda.check_error(refusal)
    except RuntimeError as error:
        raise StagingError(f"{what}: {error}. Stage less, or pass an allocator of pageable memory") from error
