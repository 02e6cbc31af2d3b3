"""Files of checkpoints: in a folder of a file system, or in an object store or anything else that fsspec reaches.

The store must find an object by its name as soon as it has been written (S3, GCS, Azure and MinIO do). A listing may
lag. fsspec, which is optional, and a file system's own package are imported only for a URL.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import IO, Any
from urllib.parse import unquote

from elaunch.trainer.files import open_regular, read_regular, reason, require_size, sync_directory, write_durably


class LocalFiles:
    """The files in `root`, which is created by the first write. Its methods raise OSError."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        """Human-readable, without secrets."""
        return str(self._root)

    @property
    def name(self) -> str:
        """The name by which another rank finds it with `below`."""
        return self._root.name

    @property
    def is_link(self) -> bool:
        """Whether the root is a symbolic link."""
        return self._root.is_symlink()

    def below(self, name: str) -> LocalFiles:
        """The folder `name` in the root."""
        return LocalFiles(self._root / name)

    def names(self) -> list[str]:
        """The names in the root; none if it does not exist."""
        try:
            return [path.name for path in self._root.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int | None:
        """The size in bytes; None if there is no such file."""
        try:
            return (self._root / name).lstat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, name: str, bytes_max: int) -> bytes:
        """The content of a file. Raises FileNotFoundError, and OSError with a sentence if it is larger."""
        return read_regular(self._root / name, bytes_max)

    def open(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a file for reading, with `seek`."""
        return open_regular(self._root / name)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file for sequential writing; it is durable when the context exits."""
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def write(self, name: str, content: bytes) -> None:
        """Write a small file durably: whole, or not there."""
        self._root.mkdir(parents=True, exist_ok=True)
        write_durably(self._root / name, content)

    def sync(self) -> None:
        """Fsync the folder and its parent: the names of the files and its own."""
        sync_directory(self._root)
        sync_directory(self._root.parent)

    def remove(self, name: str) -> None:
        (self._root / name).unlink()

    def remove_all(self) -> None:
        """Delete the folder, and all that is in it."""
        shutil.rmtree(self._root)


# In these a folder is only a prefix of names; creating one may even create a bucket.
_FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"}
_READ_AHEAD_BYTES = 8 << 20
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# What `pathlib.Path` makes of a URL.
_ONE_SLASH = re.compile(rf"({'|'.join(_FLAT)}|file):/[^/].*", re.DOTALL)


@dataclass(frozen=True)
class Url:
    """`text` is what fsspec gets, and may contain secrets; `str()` masks them."""

    scheme: str
    text: str = field(repr=False)

    def __str__(self) -> str:
        head, _, rest = self.text.partition("://")
        host, slash, path = rest.partition("/")
        if "@" in host:
            host = "***@" + host.rpartition("@")[2]
        shown, mark, _ = f"{head}://{host}{slash}{path}".partition("?")
        return shown.rstrip("/") + ("?***" if mark else "")

    def scrubbed(self, text: str) -> str:
        """A library's message, without this URL's secrets."""
        text = text.replace(self.text, str(self))
        rest = self.text.partition("://")[2]
        user, _, _ = rest.partition("/")[0].rpartition("@")
        # A user without a password is often a token. A library may print a secret percent-encoded or decoded.
        for secret in filter(None, (user, user.partition(":")[2], rest.partition("?")[2])):
            text = text.replace(secret, "***").replace(unquote(secret), "***")
        return text


def parse(text: str) -> Path | Url:
    """A local path (`file:///…` too), or a URL that fsspec knows and whose package is installed.

    Raises ValueError with one sentence for an invalid one.
    """
    match = _URL.fullmatch(text)
    if match is None:
        if _ONE_SLASH.fullmatch(text) and not os.path.lexists(text.partition("/")[0]):
            meant = Url("", text.replace(":/", "://", 1))
            raise ValueError(
                f"{text.partition('/')[0]}/ has one slash (pathlib.Path makes one of two); give the text {meant}"
            )
        return Path(text)
    scheme, rest = match[1].lower(), match[2]
    if scheme in ("file", "local"):
        if not rest.startswith("/"):
            raise ValueError(f"{text} is not an absolute path; write {scheme}:///folder, or the path alone")
        return Path(rest)
    url = Url(scheme, text)
    if not rest.strip("/"):
        raise ValueError(f"{text} names no bucket; write {scheme}://bucket/folder")
    try:
        import fsspec

        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{url} cannot be used: {error}") from None
    return url


class StorageError(OSError):
    """An operation of the storage failed; `strerror` is the reason alone, `str()` names the URL too."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class ObjectFiles:
    """The files in the folder `name` below a URL; `LocalFiles` describes each method. The first call connects.

    An object exists only once it is complete.
    """

    def __init__(self, url: Url, name: str = "") -> None:
        self._url, self.name = url, name

    def __str__(self) -> str:
        return f"{self._url}/{self.name}".rstrip("/")

    @property
    def is_link(self) -> bool:
        """An object store has no links."""
        return False

    def below(self, name: str) -> ObjectFiles:
        return ObjectFiles(self._url, name)

    def names(self) -> list[str]:
        with plain_errors(self._url):
            self._system.invalidate_cache()
            try:
                paths = self._system.ls(self._path(""), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return [PurePath(path).name for path in paths]

    def size(self, name: str) -> int | None:
        # Queried by name, since listings may lag. Only the store's own response proves that it does not exist.
        try:
            return self._size(name)
        except FileNotFoundError:
            return None

    def read(self, name: str, bytes_max: int) -> bytes:
        size = self._size(name)
        require_size(PurePath(name).name, size, bytes_max)
        if not size:
            return b""
        # At most that size, in case the object was replaced.
        with plain_errors(self._url):
            return bytes(self._system.cat_file(self._path(name), start=0, end=size))

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        with plain_errors(self._url):
            self._system.invalidate_cache()
            with self._system.open(self._path(name), "rb", block_size=_READ_AHEAD_BYTES) as file:
                yield file

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        with plain_errors(self._url):
            self._make_folder()
            file = self._system.open(self._path(name), "wb")
            try:
                yield file
            except BaseException:
                # Closing it would create an incomplete object.
                with contextlib.suppress(Exception):
                    file.discard()
                    file.closed = True
                raise
            file.close()

    def write(self, name: str, content: bytes) -> None:
        with plain_errors(self._url):
            self._make_folder()
            self._system.pipe_file(self._path(name), content)

    def sync(self) -> None:
        """An object is durable once it exists."""

    def remove(self, name: str) -> None:
        with plain_errors(self._url):
            self._system.rm_file(self._path(name))

    def remove_all(self) -> None:
        # One listing, and bulk deletes where the store has them.
        with plain_errors(self._url), contextlib.suppress(FileNotFoundError):
            self._system.invalidate_cache()
            self._system.rm(self._path(""), recursive=True)

    @property
    def _system(self) -> Any:
        """fsspec's file system."""
        return self._connected[0]

    def _path(self, name: str) -> str:
        return "/".join(filter(None, (self._connected[1], self.name, name)))

    @cached_property
    def _connected(self) -> tuple[Any, str]:
        return connect(self._url)

    def _size(self, name: str) -> int:
        with plain_errors(self._url):
            self._system.invalidate_cache()
            return int(self._system.info(self._path(name))["size"])

    def _make_folder(self) -> None:
        """Create the folder where files need one."""
        protocol = self._system.protocol
        if not _FLAT & set([protocol] if isinstance(protocol, str) else protocol):
            self._system.makedirs(self._path(""), exist_ok=True)


def connect(url: Url) -> tuple[Any, str]:
    """fsspec's file system, and the path in it. Raises StorageError."""
    import fsspec

    with plain_errors(url):
        system, root = fsspec.core.url_to_fs(url.text)
    if retries := sys.modules.get("botocore.retryhandler"):
        # A retry of S3's client in its thread would draw from the generator of the program.
        vars(retries)["random"] = random.Random()
    return system, root.rstrip("/")


@contextlib.contextmanager
def plain_errors(url: Url) -> Iterator[None]:
    """Convert the exceptions of a file system to StorageError, except FileNotFoundError."""
    try:
        yield
    except (StorageError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, url.scrubbed(reason(error)).rstrip("."), str(url)) from None
    except Exception as error:
        number = getattr(error, "errno", None) or errno.EIO
        raise StorageError(number, url.scrubbed(reason(error)).rstrip("."), str(url)) from None
