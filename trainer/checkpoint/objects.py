"""Checkpoints in an object store, or whatever else fsspec reaches: published without a rename.

A checkpoint is all objects below `generation-GGGG-step-SSSSSSSS.AAAA-NNNNNNNN/`. AAAA counts the attempts to write
below this URL, and N is random: no two writers ever name the same object. `manifest.json` is written last, when all
that it lists has been seen to be there, and it is deleted first. Objects without it are no checkpoint.

One thing is taken for granted: the store finds an object by its name as soon as it has been written (S3, GCS, Azure and
MinIO do). A listing may lag.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path, PurePath
from typing import IO, Any, cast

from elaunch.trainer.checkpoint.manifest import MANIFEST, Manifest, Mark
from elaunch.trainer.checkpoint.storage import MANIFEST_BYTES_MAX, METADATA_BYTES_MAX, NOTE_BYTES_MAX, Folder
from elaunch.trainer.checkpoint.urls import StorageError, Url, connect, plain_errors
from elaunch.trainer.files import require_size

# Takes the manifest's place in what has proved to be corrupt.
_SET_ASIDE = "manifest.corrupt.json"
# There while several ranks make sure that all see the same store.
_BEGUN = "begun"
_ATTEMPT = re.compile(r"(generation-\d+-step-\d+)\.(\d+)-[0-9a-f]+")
# In these a folder is a part of a name; making one may even make a bucket.
_FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"}
_BLOCK_BYTES = 4 << 20
_READ_AHEAD_BYTES = 8 << 20


class ObjectFolder:
    """The objects of one attempt."""

    is_remote = True
    single: Path | None = None

    def __init__(self, storage: ObjectStorage, name: str) -> None:
        self._storage, self._name = storage, name

    def __str__(self) -> str:
        return f"{self._storage}/{self._name}"

    @property
    def name(self) -> str:
        return self._name

    @property
    def attempt(self) -> int:
        match = _ATTEMPT.fullmatch(self._name)
        return int(match[2]) if match else 0

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

    def read(self, name: str, bytes_max: int = METADATA_BYTES_MAX) -> bytes:
        return self._storage.read(f"{self._name}/{name}", bytes_max)

    def sums(self, name: str) -> tuple[int, int]:
        length = crc = 0
        with self.open(name) as file:
            while block := file.read(_BLOCK_BYTES):
                length += len(block)
                crc = zlib.crc32(block, crc)
        return length, crc

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        with self._storage.errors():
            self._storage.system.invalidate_cache()
            file = self._storage.system.open(self._path(name), "rb", block_size=_READ_AHEAD_BYTES)
        try:
            yield cast(IO[bytes], _Told(file, self._storage))
        finally:
            file.close()

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        # An object is there when it is whole: it needs no other name first.
        path = self._path(name.removesuffix(".tmp"))
        with self._storage.errors():
            self._storage.make_folder(self._name)
            file = self._storage.system.open(path, "wb")
        try:
            yield cast(IO[bytes], _Told(file, self._storage))
        except BaseException:
            # Closing it would make an object of what there is.
            with contextlib.suppress(Exception):
                file.discard()
                file.closed = True
            raise
        with self._storage.errors():
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
        self._attempt = 0
        self._recalled: list[tuple[Mark, Folder]] | None = None

    def __str__(self) -> str:
        return str(self._url)

    def found(self) -> list[tuple[Mark, Folder]]:
        whole: list[tuple[Mark, Folder]] = [(mark, folder) for mark, folder in self._attempts() if folder.has(MANIFEST)]
        self._recalled = list(whole)
        return list(whole)

    def recalled(self) -> list[tuple[Mark, Folder]]:
        # This list is only for a message, which must not wait for a store that does not answer.
        if self._recalled is None:
            raise StorageError(None, "it has not answered yet", str(self))
        return self._recalled

    def folder(self, name: str) -> ObjectFolder:
        return ObjectFolder(self, name)

    def begin(self, mark: Mark, nonce: str, *, shared: bool) -> ObjectFolder:
        self._attempt += 1
        folder = self.folder(f"{mark.folder_name}.{self._attempt:04d}-{nonce}")
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
        # The same step, computed again by a job that was started anew. What cannot be listed now goes with its step.
        with contextlib.suppress(OSError):
            for mark, each in self._attempts():
                if mark == manifest.mark and each.attempt < mine.attempt:
                    self.abandon(each)

    def abandon(self, folder: Folder) -> None:
        with contextlib.suppress(OSError):
            self.discard(folder)

    def set_aside(self, folder: Folder) -> None:
        with contextlib.suppress(OSError):
            content = folder.read(MANIFEST, MANIFEST_BYTES_MAX) if folder.has(MANIFEST) else b""
            folder.write(_SET_ASIDE, content)
            folder.remove([MANIFEST])

    def discard(self, folder: Folder) -> None:
        if folder.has(MANIFEST):
            folder.remove([MANIFEST])
        # Listed and deleted together where the store can.
        with self.errors(), contextlib.suppress(FileNotFoundError):
            self.system.invalidate_cache()
            self.system.rm(f"{self.root}/{folder.name}", recursive=True)

    def restore(self) -> None:
        """Nothing is ever without its name."""

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

    def free_bytes(self) -> int | None:
        return None

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
        self._attempt = max([self._attempt, *(folder.attempt for _, folder in begun)])
        return sorted(begun, key=lambda each: (each[0], each[1].attempt, each[1].name))


class _Told:
    """fsspec's file, whose errors are the storage's."""

    def __init__(self, file: Any, storage: ObjectStorage) -> None:
        self._file, self._storage = file, storage

    def write(self, content: bytes | memoryview) -> int:
        with self._storage.errors():
            return int(self._file.write(content))

    def read(self, size: int = -1) -> bytes:
        with self._storage.errors():
            return bytes(self._file.read(size))

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def flush(self) -> None:
        with self._storage.errors():
            self._file.flush()

    def fileno(self) -> int:
        return int(self._file.fileno())
