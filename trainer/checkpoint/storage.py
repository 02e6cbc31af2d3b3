"""The seam between checkpoints and the place where they lie: a folder, or an object store.

A `Storage` finds, publishes and deletes whole checkpoints; a `Folder` is one of them, and holds files. What is behind
it may not rename (an object store cannot): how a checkpoint becomes whole in one moment is the storage's own business.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Protocol, TypeAlias

from elaunch.trainer.checkpoint.manifest import Manifest, Mark

# Limits of files that are read as a whole. Without them the writer of a folder chooses how much memory a read takes.
# A line of the manifest is about 60 bytes for each rank, DCP's metadata about 200 for each piece of a tensor.
MANIFEST_BYTES_MAX = 64 << 20
METADATA_BYTES_MAX = 1 << 30
PLAIN_BYTES_MAX = 1 << 30
NOTE_BYTES_MAX = 16 << 20


class Folder(Protocol):
    """The files of one checkpoint. All methods raise OSError; `str()` of it is for people."""

    @property
    def name(self) -> str:
        """By which another rank finds it with `Storage.folder`."""

    @property
    def single(self) -> Path | None:
        """The path of a checkpoint that is one file, which earlier releases wrote; None for a folder."""

    @property
    def is_remote(self) -> bool:
        """Whether each read goes over a network: few and in order is better than many and anywhere."""

    def is_there(self) -> bool:
        """Whether this rank sees it."""

    def has(self, name: str) -> bool:
        """Whether that file is there."""

    def names(self) -> list[str]:
        """All files."""

    def read(self, name: str, bytes_max: int = METADATA_BYTES_MAX) -> bytes:
        """All of a file; raises FileNotFoundError, and OSError with a sentence where it is larger."""

    def sums(self, name: str) -> tuple[int, int]:
        """Length in bytes and CRC-32 of a file; raises FileNotFoundError."""

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A file to be read, with `seek`."""

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A file to be written from beginning to end; durable when the context is left."""

    def write(self, name: str, content: bytes) -> None:
        """Write a small file durably: whole, or not there."""

    def rename(self, name: str, new: str) -> None:
        """Give `new` its final name; where files appear whole under their names, there is nothing to do."""

    def remove(self, names: Iterable[str]) -> None:
        """Delete these files."""


class Storage(Protocol):
    """Where the checkpoints of one run lie. All methods raise OSError; `str()` of it is for people, without secrets."""

    def found(self) -> list[tuple[Mark, Folder]]:
        """All published checkpoints, whole or not, oldest first; none where there is no such place."""

    def recalled(self) -> list[tuple[Mark, Folder]]:
        """The same for a message: where looking takes long, what was there when last looked."""

    def folder(self, name: str) -> Folder:
        """What another rank's `Folder.name` says."""

    def begin(self, mark: Mark, nonce: str, *, shared: bool) -> Folder:
        """A place for the files of `mark` that no other writer has; not published. `shared`: other ranks write too."""

    def publish(self, folder: Folder, manifest: Manifest) -> None:
        """Make it one of the checkpoints in one moment, in place of another one of the same mark."""

    def abandon(self, folder: Folder) -> None:
        """Delete what `begin` began; nothing is raised."""

    def set_aside(self, folder: Folder) -> None:
        """Keep what is torn or corrupt for people, but count it no more; nothing is raised."""

    def discard(self, folder: Folder) -> None:
        """Delete a checkpoint; killed in between, it leaves none that looks whole."""

    def restore(self) -> None:
        """Publish again what a killed writer was about to replace."""

    def sweep(self, generation: int) -> None:
        """Delete what killed writers of this and earlier generations left; a newer group's may be in the making."""

    def require_writable(self) -> None:
        """Write a small file and remove it."""

    def free_bytes(self) -> int | None:
        """The free room in bytes, or None if the storage does not tell."""

    def read_note(self, name: str) -> bytes | None:
        """A small file beside the checkpoints; None where it is not there."""

    def write_note(self, name: str, content: bytes) -> None:
        """Write it durably, whole or not at all."""


Where: TypeAlias = "str | os.PathLike[str] | Storage"


def storage_at(where: Where) -> Storage:
    """The storage that a path, a URL (`s3://bucket/run`) or a storage itself names.

    Nothing is touched and no package is imported for it yet. Raises ValueError with a sentence for a URL that cannot be
    meant.
    """
    if not isinstance(where, str | os.PathLike):
        return where
    from elaunch.trainer.checkpoint import urls

    url = urls.parse(os.fspath(where))
    if isinstance(url, Path):
        from elaunch.trainer.checkpoint.local import LocalStorage

        return LocalStorage(url)
    from elaunch.trainer.checkpoint.objects import ObjectStorage

    return ObjectStorage(url)
