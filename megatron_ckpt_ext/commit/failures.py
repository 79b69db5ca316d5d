"""The errors that end a save, raised on every rank with the same text.

They subclass torch's ``CheckpointException``, so code written for torch DCP catches them, and are ordinary
exceptions as well: torch's class derives from ``BaseException`` and escapes ``except Exception``.
"""

from collections.abc import Mapping
from traceback import StackSummary

from torch.distributed.checkpoint.api import CheckpointException

from megatron_ckpt_ext.errors import CkptExtError

__all__ = ["MetadataReuseError", "PublishFailedError", "SaveFailedError", "WriteFailedError"]


class SaveFailedError(CkptExtError, CheckpointException):
    """A save that is not in order; raised on every rank.

    Attributes:
        kind: ``"write"``, ``"metadata_reuse"`` or ``"publish"``.
        consequence: what is left of the save.
        causes: rank -> one sentence, plain data: of the lowest rank that it happened to.
    """

    kind = "save"
    consequence = "nothing was published"

    def __init__(self, causes: Mapping[int, str]) -> None:
        """Keep causes as text: a live exception of another process may not unpickle in this one."""
        self.causes = dict(sorted(causes.items()))
        CheckpointException.__init__(
            self, self.kind, {rank: (RuntimeError(cause), StackSummary()) for rank, cause in self.causes.items()}
        )

    def __str__(self) -> str:
        """Return what happened, what is left, and the causes."""
        causes = "; ".join(f"rank {rank}: {cause}" for rank, cause in self.causes.items())
        return f"checkpoint save failed ({self.kind}), {self.consequence}. {causes}"

    def __reduce__(self) -> tuple[type["SaveFailedError"], tuple[dict[int, str]]]:
        """Cross a process as plain data."""
        return (type(self), (self.causes,))


class WriteFailedError(SaveFailedError):
    """A rank could not write its part of the checkpoint."""

    kind = "write"


class MetadataReuseError(SaveFailedError):
    """What a rank holds or wrote is not what the prepared metadata says (drift)."""

    kind = "metadata_reuse"


class PublishFailedError(SaveFailedError):
    """Everything was written and agreed on, and then publishing, or what comes after it, failed on a rank."""

    kind = "publish"
    consequence = "verify_checkpoint tells whether it is complete, and the tracker may not name it"
