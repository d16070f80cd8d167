"""Any other file system that fsspec knows: ``memory://``, ``s3://``, …"""

from __future__ import annotations

import contextlib
import datetime
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fsspec

from snapctl.errors import (
    InvalidPathError,
    MissingExtraError,
    PermissionDeniedError,
    PreconditionError,
    RefusedError,
    StorageError,
    StorageNotFoundError,
    UnavailableError,
)
from snapctl.redaction import remember_secrets
from snapctl.storage.base import Storage, check_length, check_options, check_relative_path, hide_values, not_found
from snapctl.storage.local_paths import TEMPORARY_MARK
from snapctl.storage.values import FileInfo, Listing, ScannedDir

_EXTRAS = {"s3": "s3", "s3a": "s3"}
_EXCLUSIVE_SCHEMES = {"memory", "s3", "s3a"}
_WHOLE_OBJECT_SCHEMES = {"memory", "s3", "s3a", "az", "abfs", "abfss", "adl", "oci", "oss", "cos", "obs", "b2", "r2"}
"""Where an object is there in full or not at all, and there are no directories to make. Others are file systems:
``sftp``, ``hdfs``, ``smb``, …"""
_TIME_KEYS = ("created", "LastModified", "last_modified", "mtime", "timeCreated")
_VERSION_KEYS = ("VersionId", "ETag", "etag", "generation", "ino")


def open_generic(scheme: str, rest: str, options: Mapping[str, Any]) -> GenericStorage:
    """A `GenericStorage` for ``scheme://rest``.

    Raises:
        InvalidPathError: fsspec does not know the scheme.
        MissingExtraError: it does, but the package behind it is not installed.
    """
    logging.getLogger("fsspec").setLevel(logging.CRITICAL)
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        if scheme in _EXTRAS:
            raise MissingExtraError(f"support for {scheme}://", extra=_EXTRAS[scheme]) from error
        raise RefusedError(f"support for {scheme}:// is not installed", hint=str(error)) from error
    except (ValueError, RecursionError) as error:
        raise InvalidPathError(f"{scheme}://{rest}: unknown scheme {scheme!r}") from error
    url = f"{scheme}://{rest}"
    check_options(options)
    remember_secrets(fsspec.config.conf.get(scheme, {}))
    try:
        inferred = kind._get_kwargs_from_urls(url)
        file_system = kind(**{**inferred, **options, "skip_instance_cache": True, "use_listings_cache": False})
        return GenericStorage(scheme, rest, file_system)
    except (TypeError, AttributeError, ValueError, RecursionError) as error:
        reason = hide_values(f"{type(error).__name__}: {error}", options)
        raise InvalidPathError(f"{url}: cannot be opened so: {reason}") from error
    except Exception as error:
        reason = hide_values(f"{type(error).__name__}: {error}", options)
        raise StorageError(f"{url}: cannot be opened: {reason}", url=url) from error


class GenericStorage(Storage):
    """A directory of an fsspec file system.

    It asks in single calls that take paths literally. Conditions (``version``) are compared before the act, since
    fsspec has no way to state them: between the look and the act another writer can slip in.
    """

    def __init__(self, scheme: str, rest: str, file_system: Any) -> None:
        self.scheme = scheme
        self._fs = file_system
        self._rest = rest.rstrip("/")
        self.url = f"{scheme}://{self._rest}"
        self._root = str(file_system._strip_protocol(self.url))
        self._creates_exclusively: bool | None = None

    def child(self, name: str) -> GenericStorage:
        check_relative_path(name)
        return GenericStorage(self.scheme, f"{self._rest}/{name}" if self._rest else name, self._fs)

    def parent(self) -> GenericStorage | None:
        if not self._rest:
            return None
        return GenericStorage(self.scheme, self._rest.rpartition("/")[0], self._fs)

    @property
    def file_system(self) -> Any:
        """The fsspec file system behind it."""
        return self._fs

    def _full(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{check_relative_path(path)}" if path else self._root

    def _translated(self, error: BaseException, path: str) -> StorageError:
        url = self.url_of(path)
        text = f"{url}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(error, StorageError):
            return error
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return not_found(url)
        if isinstance(error, FileExistsError):
            return PreconditionError(f"{url}: exists already", url=url)
        if isinstance(error, PermissionError):
            return PermissionDeniedError(text, url=url)
        if isinstance(error, ConnectionError | TimeoutError):
            return UnavailableError(text, url=url)
        return StorageError(text, url=url)

    def _info(self, found: Mapping[str, Any], path: str) -> FileInfo:
        when = next((found[key] for key in _TIME_KEYS if found.get(key) is not None), 0.0)
        if isinstance(when, str):
            try:
                when = datetime.datetime.fromisoformat(when.replace("Z", "+00:00"))
            except ValueError:
                when = 0.0
        if isinstance(when, datetime.datetime):
            when = (when if when.tzinfo else when.replace(tzinfo=datetime.timezone.utc)).timestamp()
        size = int(found.get("size") or 0)
        version = next((f"{key}={found[key]}" for key in _VERSION_KEYS if found.get(key)), f"{size}:{when}")
        return FileInfo(path, size, float(when), version)

    def _file(self, path: str) -> str:
        return self._full(check_relative_path(path))

    def list_dir(self, path: str = "") -> Listing:
        full = self._full(path)
        try:
            self._fs.invalidate_cache()
            children = self._fs.ls(full, detail=True)
        except Exception as error:
            raise self._translated(error, path) from error
        files: list[FileInfo] = []
        dirs: set[str] = set()
        for found in children:
            name = str(found["name"]).rstrip("/")
            base = name.rpartition("/")[2]
            if name.strip("/") == full.strip("/"):
                if found.get("type") != "directory" and int(found.get("size") or 0) > 0:
                    raise not_found(self.url_of(path))  # a file, not a directory
                continue
            if found.get("type") == "directory":
                dirs.add(base)
            else:
                inner = f"{path}/{base}" if path else base
                info = self._info(found, inner) if found.get("size") is not None else self.find_file(inner)
                files += [info] if info is not None else []
        return Listing(tuple(sorted(files, key=lambda file: file.path)), tuple(sorted(dirs)))

    def list_tree(self, path: str = "", *, cuts: Sequence[str] = ()) -> list[FileInfo]:
        found: list[FileInfo] = []
        todo = [path]
        while todo:
            directory = todo.pop()
            try:
                listing = self.list_dir(directory)
            except FileNotFoundError:
                continue
            found += listing.files
            todo += [f"{directory}/{name}" if directory else name for name in listing.dirs]
        return sorted(found, key=lambda file: file.path)

    def scan(self, names: Sequence[str], wanted: Sequence[str], *, totals: bool = False) -> Iterator[ScannedDir]:
        for name in names:
            yield self._scan_one(name, wanted, totals=totals)

    def _scan_one(self, name: str, wanted: Sequence[str], *, totals: bool) -> ScannedDir:
        found = ScannedDir(name)
        child = self.child(name)
        try:
            listing = child.list_dir()
            found.files = [file for file in listing.files if file.path in wanted]
            for inner in listing.dirs:
                if f"{inner}/" in wanted:
                    with contextlib.suppress(StorageNotFoundError):  # it has vanished since it was listed
                        found.files += child.list_dir(inner).files
            if totals:
                files = child.list_tree()
                found.file_count, found.size_bytes = len(files), sum(file.size_bytes for file in files)
        except StorageError as error:
            found.error = error
        return found

    def find_file(self, path: str) -> FileInfo | None:
        full = self._file(path)
        try:
            self._fs.invalidate_cache()
            found = self._fs.info(full)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._translated(error, path) from error
        return None if found.get("type") == "directory" else self._info(found, path)

    def _check_version(self, path: str, version: str) -> FileInfo | None:
        found = self.find_file(path)
        if found is not None and version and found.version != version:
            raise PreconditionError(f"{self.url_of(path)}: is no longer the object that was listed", url=self.url)
        return found

    def read_range(self, path: str, start: int, end: int, *, version: str = "") -> bytes:
        if end <= start:
            return b""
        full = self._file(path)
        try:
            data = bytes(self._fs.cat_file(full, start=start, end=end))
        except Exception as error:
            raise self._translated(error, path) from error
        check_length(len(data), end - start, url=self.url_of(path), start=start)
        return data

    def read(self, path: str, *, version: str = "") -> bytes:
        full = self._file(path)
        try:
            return bytes(self._fs.cat_file(full))
        except Exception as error:
            raise self._translated(error, path) from error

    def write(
        self,
        path: str,
        data: bytes | memoryview,
        *,
        exclusive: bool = False,
        version: str = "",
        durable: bool = True,
    ) -> FileInfo:
        full = self._file(path)
        if exclusive:
            self._require_exclusive_create()
        elif version and self._check_version(path, version) is None:
            raise PreconditionError(f"{self.url_of(path)}: is no longer there", url=self.url_of(path))
        try:
            if exclusive:
                self._fs.pipe_file(full, bytes(data), mode="create")
            elif self.scheme in _WHOLE_OBJECT_SCHEMES:
                self._fs.pipe_file(full, bytes(data))
            else:
                self._write_aside(full, bytes(data))
        except Exception as error:
            raise self._translated(error, path) from error
        found = self.find_file(path)
        if found is None:
            raise StorageError(f"{self.url_of(path)}: was written and is not there", url=self.url_of(path))
        return found

    def write_blob(self, path: str, data: bytes | memoryview, *, durable: bool = True) -> FileInfo:
        if self.scheme not in _WHOLE_OBJECT_SCHEMES:
            try:
                self._fs.makedirs(self._file(path).rpartition("/")[0], exist_ok=True)
            except Exception as error:
                raise self._translated(error, path) from error
        return super().write_blob(path, data, durable=durable)

    def make_dir(self, *, durable: bool = True) -> None:
        if self.scheme not in _WHOLE_OBJECT_SCHEMES:
            try:
                self._fs.makedirs(self._root, exist_ok=True)
            except Exception as error:
                raise self._translated(error, "") from error

    def _write_aside(self, full: str, data: bytes) -> None:
        """On a file system a reader would see half a file: it is written under another name and renamed."""
        parent = full.rpartition("/")[0]
        if parent.startswith(self._root.rstrip("/") + "/"):
            self._fs.makedirs(parent, exist_ok=True)
        temporary = f"{full}{TEMPORARY_MARK}{uuid.uuid4().hex[:12]}"
        try:
            self._fs.pipe_file(temporary, data)
            try:
                self._fs.mv(temporary, full)
            except FileExistsError:  # it renames over nothing
                self._fs.rm_file(full)
                self._fs.mv(temporary, full)
        except BaseException:
            with contextlib.suppress(Exception):  # it was never there, or nothing can be done about it
                self._fs.rm_file(temporary)
            raise

    def _require_exclusive_create(self) -> None:
        """Refuses a file system that would check, and then write: tried once, since many take the word and ignore it.

        The names of the schemes that do it in one act are known; a server behind them may still not.
        """
        if self._creates_exclusively is None:
            self._creates_exclusively = self.scheme in _EXCLUSIVE_SCHEMES and self._tries_exclusive_create()
        if not self._creates_exclusively:
            raise RefusedError(f"{self.url}: {self.scheme}:// cannot create a file exclusively")

    def _tries_exclusive_create(self) -> bool:
        full = self._full(f"exclusive.snapctl-tmp-{uuid.uuid4().hex[:12]}")
        try:
            self._fs.pipe_file(full, b"", mode="create")
            try:
                self._fs.pipe_file(full, b"", mode="create")
            except FileExistsError:
                return True
            finally:
                self._fs.rm_file(full)
        except (NotImplementedError, TypeError):
            return False
        except Exception as error:
            raise self._translated(error, "") from error
        return False

    def delete(self, path: str, *, version: str = "") -> bool:
        if self._check_version(path, version) is None:
            return False
        try:
            self._fs.rm_file(self._file(path))
        except FileNotFoundError:
            return False
        except Exception as error:
            raise self._translated(error, path) from error
        return True

    def delete_empty_dirs(self, path: str = "") -> None:
        try:
            listing = self.list_dir(path)
        except StorageError:
            return
        for name in listing.dirs:
            self.delete_empty_dirs(f"{path}/{name}" if path else name)
        try:
            if not self.list_dir(path).files:
                self._fs.rmdir(self._full(path))
        except (StorageError, OSError, NotImplementedError):
            return

    def server_now(self) -> float:
        name = f"clock.snapctl-tmp-{uuid.uuid4().hex[:12]}"
        found = self.write(name, b"")
        self.delete(name)
        if not found.modified_at:
            raise StorageError(f"{self.url}: {self.scheme}:// tells no times", url=self.url)
        return found.modified_at
