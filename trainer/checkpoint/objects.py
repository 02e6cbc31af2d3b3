"""Checkpoints in an object store, or whatever else fsspec reaches: published without a rename.

A checkpoint is all objects below `generation-GGGG-step-SSSSSSSS.NNNNNNNN/`. N is random: no two writers ever name the
same object. `manifest.json` is written last, when all that it lists has been seen to be there, and it is deleted first.
Objects without it are no checkpoint.

One thing is taken for granted: the store finds an object by its name as soon as it has been written (S3, GCS, Azure and
MinIO do). A listing may lag. fsspec, which is optional, and a file system's own package are imported for a URL alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import secrets
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import IO, Any, cast
from urllib.parse import unquote

from elaunch.trainer.checkpoint.storage import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    NOTE_BYTES_MAX,
    Folder,
    Manifest,
    Mark,
    StorageError,
)
from elaunch.trainer.files import require_size

# Takes the manifest's place in what has proved to be corrupt.
_SET_ASIDE = "manifest.corrupt.json"
# There while several ranks make sure that all see the same store.
_BEGUN = "begun"
_ATTEMPT = re.compile(r"(generation-\d+-step-\d+)\.[0-9a-f]+")
# In these a folder is a part of a name; making one may even make a bucket.
_FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"}
_READ_AHEAD_BYTES = 8 << 20
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# What `pathlib.Path` makes of a URL.
_ONE_SLASH = re.compile(rf"({'|'.join(_FLAT)}|file):/[^/].*", re.DOTALL)


@dataclass(frozen=True)
class Url:
    """`text` is what fsspec gets, with the secrets that may be in it; `str()` is for people."""

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
        """Another's message, without this URL's secrets."""
        text = text.replace(self.text, str(self))
        rest = self.text.partition("://")[2]
        user, _, _ = rest.partition("/")[0].rpartition("@")
        # A user without a password is often a token. A library may name a secret as it is written or as it is meant.
        for secret in filter(None, (user, user.partition(":")[2], rest.partition("?")[2])):
            text = text.replace(secret, "***").replace(unquote(secret), "***")
        return text


def parse(text: str) -> Path | Url:
    """A path of this machine (`file:///…` too), or a URL that fsspec knows and whose package is there.

    Raises ValueError with one sentence for one that cannot be meant.
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
            raise ValueError(f"{text} is no absolute path; write {scheme}:///folder, or the path alone")
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


class ObjectFolder:
    """The objects of one attempt."""

    is_remote = True

    def __init__(self, storage: ObjectStorage, name: str) -> None:
        self._storage, self._name = storage, name

    def __str__(self) -> str:
        return f"{self._storage}/{self._name}"

    @property
    def name(self) -> str:
        return self._name

    def is_there(self) -> bool:
        return self.has(MANIFEST) or self.has(_BEGUN)

    def has(self, name: str) -> bool:
        # By its name, which no listing's lag concerns.
        return self.size(name) is not None

    def names(self) -> list[str]:
        return self._storage.listed(self._name)

    def size(self, name: str) -> int | None:
        """In bytes; None where it is not there, which nothing but the store's own word proves."""
        try:
            return self._storage.size(f"{self._name}/{name}")
        except FileNotFoundError:
            return None

    def read(self, name: str, bytes_max: int) -> bytes:
        return self._storage.read(f"{self._name}/{name}", bytes_max)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        with self._storage.errors():
            self._storage.system.invalidate_cache()
            with self._storage.system.open(self._path(name), "rb", block_size=_READ_AHEAD_BYTES) as file:
                yield file

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        # An object is there when it is whole: it needs no other name first.
        path = self._path(name.removesuffix(".tmp"))
        with self._storage.errors():
            self._storage.make_folder(self._name)
            file = self._storage.system.open(path, "wb")
            try:
                yield file
            except BaseException:
                # Closing it would make an object of what there is.
                with contextlib.suppress(Exception):
                    file.discard()
                    file.closed = True
                raise
            file.close()

    def write(self, name: str, content: bytes) -> None:
        with self._storage.errors():
            self._storage.make_folder(self._name)
            self._storage.system.pipe_file(self._path(name), content)

    def rename(self, name: str, new: str) -> None:
        """It has its name; see `create`."""

    def remove(self, names: Iterable[str]) -> None:
        with self._storage.errors():
            if paths := [self._path(name) for name in names]:
                self._storage.system.rm(paths)

    def _path(self, name: str) -> str:
        return f"{self._storage.root}/{self._name}/{name}"


class ObjectStorage:
    """The checkpoints below a URL. The network is not touched before the first method is called."""

    def __init__(self, url: Url) -> None:
        self._url = url

    def __str__(self) -> str:
        return str(self._url)

    def found(self) -> list[tuple[Mark, Folder]]:
        return [(mark, folder) for mark, folder in self._attempts() if folder.has(MANIFEST)]

    def folder(self, name: str) -> ObjectFolder:
        return ObjectFolder(self, name)

    def begin(self, mark: Mark, nonce: str, *, shared: bool) -> ObjectFolder:
        folder = self.folder(f"{mark.folder_name}.{nonce}")
        if shared:
            folder.write(_BEGUN, b"")
        return folder

    def publish(self, folder: Folder, manifest: Manifest) -> None:
        mine = cast(ObjectFolder, folder)
        for name, (length, _) in manifest.files.items():
            if (size := mine.size(name)) != length:
                there = "is not there" if size is None else f"has {size} bytes there"
                why = f"{name} {there} after {length} were written; another start may have cleaned it up"
                raise StorageError(None, why, str(self))
        mine.write(MANIFEST, manifest.to_bytes())

    def abandon(self, folder: Folder) -> None:
        with contextlib.suppress(OSError):
            self.discard(folder)

    def set_aside(self, folder: Folder) -> None:
        with contextlib.suppress(OSError):
            is_there = cast(ObjectFolder, folder).has(MANIFEST)
            content = folder.read(MANIFEST, MANIFEST_BYTES_MAX) if is_there else b""
            folder.write(_SET_ASIDE, content)
            folder.remove([MANIFEST])

    def discard(self, folder: Folder) -> None:
        if cast(ObjectFolder, folder).has(MANIFEST):
            folder.remove([MANIFEST])
        # Listed and deleted together where the store can.
        with self.errors(), contextlib.suppress(FileNotFoundError):
            self.system.invalidate_cache()
            self.system.rm(f"{self.root}/{folder.name}", recursive=True)

    def sweep(self, generation: int) -> None:
        for mark, folder in self._attempts():
            with contextlib.suppress(OSError):
                if mark.generation <= generation and not folder.has(MANIFEST) and not folder.has(_SET_ASIDE):
                    self.discard(folder)

    def require_writable(self) -> None:
        name = f".writable-{secrets.token_hex(4)}"
        self.write_note(name, b"")
        with self.errors():
            self.system.rm_file(f"{self.root}/{name}")

    def read_note(self, name: str) -> bytes | None:
        try:
            return self.read(name, NOTE_BYTES_MAX)
        except FileNotFoundError:
            return None

    def write_note(self, name: str, content: bytes) -> None:
        with self.errors():
            self.make_folder("")
            self.system.pipe_file(f"{self.root}/{name}", content)

    # What `ObjectFolder` is made of.

    @property
    def system(self) -> Any:
        """fsspec's file system."""
        return self._connected[0]

    @property
    def root(self) -> str:
        """The path of this URL in it."""
        return self._connected[1]

    @cached_property
    def _connected(self) -> tuple[Any, str]:
        return connect(self._url)

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Around all that fsspec does."""
        return plain_errors(self._url)

    def size(self, name: str) -> int:
        """The size of an object below this URL, in bytes; raises FileNotFoundError."""
        with self.errors():
            self.system.invalidate_cache()
            return int(self.system.info(f"{self.root}/{name}")["size"])

    def read(self, name: str, bytes_max: int) -> bytes:
        """All of an object below this URL; raises FileNotFoundError, and OSError where it is larger."""
        size = self.size(name)
        require_size(PurePath(name).name, size, bytes_max)
        if not size:
            return b""
        # No more than that, were it another object by now.
        with self.errors():
            return bytes(self.system.cat_file(f"{self.root}/{name}", start=0, end=size))

    def listed(self, name: str) -> list[str]:
        """The names below this URL, or below one of its folders; none where there is nothing."""
        with self.errors():
            self.system.invalidate_cache()
            try:
                paths = self.system.ls(f"{self.root}/{name}".rstrip("/"), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return [PurePath(path).name for path in paths]

    def make_folder(self, name: str) -> None:
        """Where files need one."""
        protocol = self.system.protocol
        if not _FLAT & set([protocol] if isinstance(protocol, str) else protocol):
            self.system.makedirs(f"{self.root}/{name}", exist_ok=True)

    def _attempts(self) -> list[tuple[Mark, ObjectFolder]]:
        """All that was begun and is still there, the oldest first."""
        begun = []
        for name in self.listed(""):
            match = _ATTEMPT.fullmatch(name)
            mark = Mark.of(PurePath(match[1])) if match else None
            if mark is not None:
                begun.append((mark, self.folder(name)))
        return sorted(begun, key=lambda each: (each[0], each[1].name))


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
    """Whatever a file system raises becomes StorageError, or FileNotFoundError where it is that."""
    try:
        yield
    except (StorageError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, _words(error, url), str(url)) from None
    except Exception as error:
        number = getattr(error, "errno", None) or errno.EIO
        raise StorageError(number, _words(error, url), str(url)) from None


def _words(error: Exception, url: Url) -> str:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    first = next(iter(said.strip().splitlines()), "")
    return url.scrubbed(first).rstrip(".") or type(error).__name__
