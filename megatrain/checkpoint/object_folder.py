"""Objects below a URL, read and written through fsspec.

This module uses only these methods of fsspec's file systems: ``ls``, ``open``, ``pipe_file``, ``cat_file``,
``rm_file``, ``rm`` and ``makedirs``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatrain.checkpoint.copy_thread import CopyCancelledError
from megatrain.checkpoint.state import CheckpointError
from tiered import MiB
from tiered.errors import TieredError

__all__ = ["PART_BYTES", "DamagedError", "ObjectFolder", "RemoteError"]

#: Number of concurrent uploads or downloads. Each needs a 16 MiB buffer in addition to fsspec's buffers.
NUM_WORKERS = 2
#: Bytes per part of an upload, and per read.
PART_BYTES = 8 * MiB

_WITH_FOLDERS = ("file", "local", "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs", "arrow_hdfs")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING")


class RemoteError(CheckpointError):
    """A URL cannot be reached or written, or its objects cannot be used."""


class DamagedError(RemoteError):
    """An object differs from the object that was uploaded."""


class ObjectFolder:
    """The objects at a URL. The constructor reads nothing. Thread-safe.

    Args:
        url: Any URL that fsspec opens, e.g. ``"s3://bucket/run"``. Credentials come from the environment.

    Raises:
        RemoteError: fsspec's package for the URL is missing, or the URL does not refer to a file system.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if not url.endswith("://") else url
        protocol = url.partition("://")[0]
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            package = _PACKAGES.get(protocol)
            advice = f"pip install {package}" if package else "Name a URL that fsspec knows, such as s3://bucket/folder"
            text = f"checkpoint.save_copy: '{url}' cannot be opened: {_mask_secrets(str(error)).rstrip('.')}. {advice}"
            raise RemoteError(text) from error
        except Exception as error:
            raise self._error("it cannot be opened", error) from error
        self._root = self._root.rstrip("/")
        self._has_folders = protocol in _WITH_FOLDERS

    def read(self, name: str) -> bytes | None:
        """Return a small object, or None if it does not exist."""
        with self._explain_errors(f"'{name}' cannot be read"):
            try:
                return bytes(self._files.cat_file(f"{self._root}/{name}"))
            except FileNotFoundError:
                return None

    def sha256(self, name: str, nbytes: int, on_part: Callable[[bytes], object] = lambda part: None) -> str:
        """Read an object and return its SHA-256. Call ``on_part`` with each part."""
        digest = hashlib.sha256()
        for start in range(0, nbytes, PART_BYTES):
            with self._explain_errors(f"'{name}' cannot be read"):
                try:
                    part = self._files.cat_file(
                        f"{self._root}/{name}", start=start, end=min(start + PART_BYTES, nbytes)
                    )
                except FileNotFoundError as error:
                    raise DamagedError(f"'{self.url}/{name}' is missing") from error
            digest.update(part)
            on_part(part)
        return digest.hexdigest()

    def list_folders(self) -> list[str]:
        """Return the names of the folders and objects at the URL. Raises ``RemoteError``."""
        with self._explain_errors("it cannot be listed"):
            try:
                names = self._files.ls(self._root, detail=False)
            except FileNotFoundError as error:
                if "bucket does not exist" in str(error):
                    raise
                return []
        return [str(name).rstrip("/").rpartition("/")[2] for name in names]

    def remove_folder(self, name: str, document: str) -> None:
        """Remove a folder, beginning with its document, so that readers ignore a partially removed folder."""
        with self._explain_errors(f"'{name}' cannot be removed"):
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(f"{self._root}/{name}/{document}")
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(f"{self._root}/{name}", recursive=True)

    def write(self, name: str, contents: bytes | Iterable[memoryview | bytes]) -> None:
        """Write an object. An interrupted write leaves either no object or an incomplete one."""
        path = f"{self._root}/{name}"
        with self._explain_errors(f"'{name}' cannot be written"):
            if self._has_folders:
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            if isinstance(contents, bytes):
                self._files.pipe_file(path, contents)
                return
            file = self._files.open(path, "wb", block_size=PART_BYTES)
            try:
                for part in contents:
                    file.write(part)
            except BaseException:
                # Closing the file would turn the partial upload into an object.
                with contextlib.suppress(Exception):
                    file.discard()
                with contextlib.suppress(Exception):
                    file.closed = True
                raise
            file.close()

    @staticmethod
    def run_parallel(function: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Call ``function`` with each item on ``NUM_WORKERS`` threads. After an error, start no further calls."""
        with ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="checkpoint-objects") as workers:
            futures = [workers.submit(function, item) for item in items]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    @property
    def title(self) -> str:
        """Name of the folder, for messages: the config key and the URL."""
        return f"checkpoint.save_copy: '{self.url}'"

    @contextlib.contextmanager
    def _explain_errors(self, problem: str) -> Iterator[None]:
        try:
            yield
        except (RemoteError, TieredError, CopyCancelledError):
            raise
        except Exception as error:  # fsspec file systems and their clients raise errors of any type
            raise self._error(problem, error) from error

    def _error(self, problem: str, error: Exception) -> RemoteError:
        text = _mask_secrets(str(error) or type(error).__name__).rstrip(".")
        names = [base.__name__ for base in type(error).__mro__]
        is_anonymous = "NoCredentialsError" in names or "locate credentials" in text
        if is_anonymous or "PartialCredentialsError" in names or "DefaultCredentialsError" in names:
            text += (
                ". No credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (s3); "
                "GOOGLE_APPLICATION_CREDENTIALS (gs)"
            )
        elif isinstance(error, PermissionError):
            text += ". These credentials lack permission: they need the right to list, read, write and delete there"
        elif isinstance(error, FileNotFoundError):
            text += ". Is the name of the bucket right? The bucket must exist"
        return RemoteError(f"{self.title}: {problem}: {text}")


def _mask_secrets(text: str) -> str:
    """Return an error's text with possible secrets masked."""
    for name in _SECRETS:
        if value := os.environ.get(name):
            text = text.replace(value, "***")
    text = re.sub(r"(\w+://)[^\s'\"]*:[^\s'\"]*@", r"\1***@", text)
    return re.sub(r"([?&][\w.-]*(?:sig|token|secret|credential|key)[\w.-]*=)[^&\s'\"]+", r"\1***", text, flags=re.I)
