"""The multi-storage client: the few names of it that are used. Every failure is an ``OSError``, as with local files.

Read in multi-storage-client 1.3.1 and megatron-core 0.19.2; ``tests/test_compat_msc.py`` notices when one moves. It is
imported when an ``msc://`` path is used, so that nothing else needs it.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron_ckpt_ext.errors import ConfigurationError

__all__ = [
    "ObjectEntry",
    "delete_object",
    "file_path",
    "list_objects",
    "mapped_profile",
    "megatron_uses_msc",
    "object_size",
    "object_url",
    "read_object",
    "write_object",
]

_SCHEME = "msc:"


class ObjectEntry(NamedTuple):
    """What lies directly below a prefix."""

    name: str
    """Last part of its path."""
    is_directory: bool
    """Whether it is a prefix of other objects; there need not be an object of that name."""
    size: int
    """Bytes of an object."""


def object_url(path: str) -> str | None:
    """Return the one spelling of the URL that ``path`` means, or ``None`` if it is local.

    ``pathlib`` makes ``msc:/profile`` of ``msc://profile``; the client reads both spellings, and so do we.
    """
    scheme, slash, rest = path.partition("/")
    if scheme != _SCHEME or not slash:
        return None
    return f"{_SCHEME}//" + "/".join(part for part in rest.split("/") if part)


def list_objects(url: str) -> Iterator[ObjectEntry]:
    """Yield what lies directly below ``url``; nothing if there is nothing. No collectives.

    Args:
        url: as ``object_url`` spells it.

    Raises:
        OSError: it cannot be listed.
    """
    with _os_errors(url):
        for entry in _client().list(f"{url}/", include_directories=True):
            key = entry.key.rstrip("/")
            if key != url:  # consoles of object stores put an object there for an empty folder
                yield ObjectEntry(os.path.basename(key), entry.type == "directory", entry.content_length)


def object_size(url: str) -> int:
    """Return the bytes of an object. No collectives.

    Raises:
        OSError: missing (``FileNotFoundError``), a prefix, or not readable; ``strerror`` says which.
    """
    with _os_errors(url):
        found = _client().info(url)
        if found.type == "directory":
            raise OSError(errno.EINVAL, "Not a regular file", url)
        return int(found.content_length)


def read_object(url: str) -> bytes:
    """Return a whole object as it is now, whatever a cache of the profile holds. No collectives.

    Raises:
        OSError: missing (``FileNotFoundError``) or not readable; ``strerror`` says which.
    """
    with _os_errors(url), _client().open(url, "rb", disable_read_cache=True) as file:
        return bytes(file.read())


def write_object(url: str, content: bytes) -> None:
    """Put an object in one piece, durable as far as its storage goes. No collectives.

    Raises:
        OSError: it may be there or not; an older one may still be there.
    """
    with _os_errors(url):
        file = _client().open(url, "wb")
        try:
            file.write(content)
            file.flush()
            file.fsync()
        except BaseException:
            file.discard()
            raise
        file.close()  # it appears here: a rename on a file system, the upload elsewhere


def delete_object(url: str) -> None:
    """Remove an object if it is there. No collectives.

    Raises:
        OSError: it is there and cannot be removed.
    """
    try:
        with _os_errors(url):
            _client().delete(url)
    except FileNotFoundError:
        return


def file_path(url: str) -> str | None:
    """Return the file that an object is, if its profile lies on a file system. No collectives.

    Raises:
        OSError: the profile cannot be used.
    """
    with _os_errors(url):
        client, path = _client().resolve_storage_client(url)
        found = client.get_posix_path(path)
    return None if found is None else str(found)


def mapped_profile(path: str) -> str | None:
    """Return the profile to which the client's ``path_mapping`` leads a local path, or ``None``. No collectives.

    Raises:
        OSError: that profile cannot be used.
    """
    with _os_errors(path):
        client, _ = _client().resolve_storage_client(os.path.abspath(path))
    return None if client.is_default_profile() else str(client.profile)


def megatron_uses_msc() -> bool:
    """Whether Megatron sends its paths through the client (``--enable-msc``). No collectives."""
    from megatron.core.msc_utils import MultiStorageClientFeature

    return bool(MultiStorageClientFeature.is_enabled())


def _client() -> Any:
    try:
        import multistorageclient
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "msc:// paths need the multi-storage client, which is not installed: pip install multi-storage-client"
        ) from error
    return multistorageclient


@contextmanager
def _os_errors(url: str) -> Iterator[None]:
    """Providers raise what they like; a missing object is a ``FileNotFoundError`` with all of them."""
    try:
        yield
    except ConfigurationError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url) from error
    except OSError as error:
        if error.strerror:
            raise
        raise OSError(errno.EIO, str(error), url) from error
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error
