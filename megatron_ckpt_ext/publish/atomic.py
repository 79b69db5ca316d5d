"""Files and objects that appear whole: three verbs for whoever saves, on any kind of path.

What is staged survives a crash but does not count; publishing it is one small step. On a file system that step is a
rename; for ``msc://`` paths, which have none, it is the upload of a marker (see ``publish.storage.objects``).
"""

from collections.abc import Iterable

from megatron_ckpt_ext.publish.storage.interface import StagedFile, storage_of

__all__ = ["StagedFile", "make_names_durable", "remove_file", "stage_file", "write_file"]


def stage_file(path: str, chunks: Iterable[bytes]) -> StagedFile:
    """Make ``chunks`` durable for ``path``, to be published later. No collectives.

    Returns:
        Plain data; another process may publish or discard it.

    Raises:
        OSError: nothing that counts is left behind.
    """
    return storage_of(path).stage(path, chunks)


def make_names_durable(directory: str) -> None:
    """Make the names of files durable that others have written and synced in ``directory``. No collectives.

    Raises:
        OSError: it cannot be opened or synced.
    """
    storage_of(directory).sync_names(directory)


def write_file(path: str, chunks: Iterable[bytes]) -> None:
    """Make ``path`` appear with the bytes of ``chunks``, replacing an older file. No collectives.

    Raises:
        OSError: an older file is untouched unless only the last step, which makes the rename durable, failed; an older
            object is untouched or replaced, and an older ``.metadata`` object does not count any more.
    """
    staged = stage_file(path, chunks)
    try:
        staged.publish()
    except BaseException:
        staged.discard()
        raise


def remove_file(path: str) -> None:
    """Remove ``path`` durably if it is there. No collectives.

    Raises:
        OSError: it is there and cannot be removed.
    """
    storage_of(path).remove(path)
