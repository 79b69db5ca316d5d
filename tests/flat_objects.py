"""A provider of the multi-storage client that is like object storage: flat keys, no directories, no rename.

A fake at the seam of storage: everything above it is the real client. Objects are files of one folder, so processes
share them, and an upload is visible when its rename is. Importing this module makes the provider known to the client.
"""

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote

import multistorageclient.providers
from multistorageclient.config import STORAGE_PROVIDER_MAPPING
from multistorageclient.providers.base import BaseStorageProvider
from multistorageclient.types import ObjectMetadata, ProviderBundle, StorageProviderConfig, SymlinkHandling

BUCKET = "bucket"


class FlatObjects(BaseStorageProvider):
    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(base_path=BUCKET, provider_name="flat", config_dict=options.get("config_dict"))
        self._folder = Path(folder)

    def _put_object(self, path: str, body: bytes, *args: Any, **options: Any) -> int:
        upload = self._folder / f"upload {uuid.uuid4().hex}"
        upload.write_bytes(body)
        upload.rename(self._file(path))
        return len(body)

    def _get_object(self, path: str, byte_range: Any = None) -> bytes:
        body = self._file(path).read_bytes()
        return body if byte_range is None else body[byte_range.offset : byte_range.offset + byte_range.size]

    def _copy_object(self, src_path: str, dest_path: str) -> int:
        return self._put_object(dest_path, self._get_object(src_path))

    def _delete_object(self, path: str, if_match: str | None = None) -> None:
        self._file(path).unlink()

    def _make_symlink(self, path: str, target: str) -> None:
        raise NotImplementedError

    def _get_object_metadata(self, path: str, strict: bool = True) -> ObjectMetadata:
        if path in self._keys() and not path.endswith("/"):
            return self._described(path)
        if any(key.startswith(path.rstrip("/") + "/") for key in self._keys()):
            return self._described(path.rstrip("/") + "/", kind="directory")
        raise FileNotFoundError(f"Object {path} does not exist.")

    def _list_objects(
        self,
        path: str,
        start_after: str | None = None,
        end_at: str | None = None,
        include_directories: bool = False,
        symlink_handling: SymlinkHandling = SymlinkHandling.FOLLOW,
    ) -> Iterator[ObjectMetadata]:
        listed = set()
        for key in self._keys():
            if not key.startswith(path):
                continue
            if key.endswith("/"):  # what a console makes for an empty folder; the S3 provider lists it like this
                if include_directories:
                    yield self._described(key.rstrip("/"), kind="directory")
                continue
            below = key.removeprefix(path)
            first, slash, _rest = below.partition("/")
            if slash and include_directories:
                if first not in listed:
                    listed.add(first)
                    yield self._described(path + first, kind="directory")
            else:
                yield self._described(key)

    def _upload_file(self, remote_path: str, f: str | IO[bytes], attributes: Any = None) -> int:
        content = Path(f).read_bytes() if isinstance(f, str) else f.read()
        return self._put_object(remote_path, content.encode() if isinstance(content, str) else content)

    def _download_file(self, remote_path: str, f: str | IO[bytes], metadata: Any = None) -> int:
        body = self._get_object(remote_path)
        if isinstance(f, str):
            return Path(f).write_bytes(body)
        f.write(body.decode() if isinstance(f, StringIO) else body)
        return len(body)

    def _keys(self) -> list[str]:
        return sorted(unquote(file.name) for file in self._folder.iterdir() if not file.name.startswith("upload "))

    def _file(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    def _described(self, key: str, kind: str = "file") -> ObjectMetadata:
        size = self._file(key).stat().st_size if kind == "file" else 0
        return ObjectMetadata(key=key, content_length=size, last_modified=datetime.now(UTC), type=kind)


class FlatBundle(ProviderBundle):
    def __init__(self, folder: str) -> None:
        self._folder = folder

    @property
    def storage_provider_config(self) -> StorageProviderConfig:
        return StorageProviderConfig("flat", {"folder": self._folder})

    @property
    def credentials_provider(self) -> None:
        return None

    @property
    def metadata_provider(self) -> None:
        return None

    @property
    def replicas(self) -> list[Any]:
        return []


STORAGE_PROVIDER_MAPPING["flat"] = "FlatObjects"
multistorageclient.providers.FlatObjects = FlatObjects
