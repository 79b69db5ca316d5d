"""Why a state dict cannot be staged."""

from megatron_ckpt_ext.errors import CkptExtError

__all__ = ["NoRoomError", "StagingError"]


class StagingError(CkptExtError):
    """A state dict that cannot be copied into host memory. Nothing was copied, or the copies are not to be used."""


class NoRoomError(StagingError):
    """A state dict that is larger than the byte budget, or than the free host memory. Nothing was copied.

    Attributes:
        needed: bytes of all buffers that the state dict takes.
        new: how many of them are not allocated yet.
        limit: the byte budget; ``None`` if there is none.
        free: bytes of host memory that are free.
    """

    def __init__(self, *, needed: int, new: int, limit: int | None, free: int) -> None:
        super().__init__(
            f"staging this state dict takes {needed} bytes of host memory, {max(0, new)} of them newly allocated; the "
            f"budget is {'not limited' if limit is None else f'{limit} bytes'}, and {free} bytes are free. Save less, "
            "give this process more memory, or save synchronously"
        )
        self.needed, self.new, self.limit, self.free = needed, new, limit, free
