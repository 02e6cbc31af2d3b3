"""Checkpoints in a folder of a file system: made under a hidden name, synced, and renamed.

A checkpoint is a folder `generation-GGGG-step-SSSSSSSS`, made under a hidden name and renamed when all of it is on the
disk. Its `manifest.json` lists the other files with lengths and CRC-32.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from elaunch.trainer.checkpoint.storage import MANIFEST, NOTE_BYTES_MAX, Folder, Manifest, Mark
from elaunch.trainer.files import open_regular, read_regular, sync_directory, write_durably

CORRUPT_SUFFIX = ".corrupt"
_HIDDEN = re.compile(r"\.generation-(\d+)-step-\d+\.")


@dataclass(frozen=True)
class LocalFolder:
    """The files of one checkpoint.

    `name` is that by which another rank finds it with `folder`. `is_remote` says that each read goes over a network:
    few and in order is better than many and anywhere.
    """

    path: Path
    is_remote = False

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def is_there(self) -> bool:
        """Whether this rank sees it."""
        return self.path.is_dir()

    def names(self) -> list[str]:
        return [path.name for path in self.path.iterdir()]

    def read(self, name: str, bytes_max: int) -> bytes:
        """All of a file; raises FileNotFoundError, and OSError with a sentence where it is larger."""
        return read_regular(self.path / name, bytes_max)

    def open(self, name: str) -> IO[bytes]:
        """A file to be read, with `seek`."""
        return open_regular(self.path / name)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """A file to be written from beginning to end; durable when the context is left."""
        with (self.path / name).open("wb") as file:
            yield file
            # DCP syncs what it has not flushed yet: of `.metadata` nothing at all.
            file.flush()
            os.fsync(file.fileno())

    def write(self, name: str, content: bytes) -> None:
        """Write a small file durably: whole, or not there."""
        write_durably(self.path / name, content)

    def rename(self, name: str, new: str) -> None:
        (self.path / name).rename(self.path / new)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / name).unlink()


class LocalStorage:
    """The checkpoints in `directory`, which is made when something is written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __str__(self) -> str:
        return str(self.directory)

    def found(self) -> list[tuple[Mark, Folder]]:
        """All published checkpoints, whole or not, oldest first; none where there is no such place."""
        try:
            paths = [path for path in self.directory.iterdir() if path.is_dir()]
            listed = sorted((mark, path) for path in paths if (mark := Mark.of(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [(mark, LocalFolder(path)) for mark, path in listed]

    def folder(self, name: str) -> LocalFolder:
        return LocalFolder(self.directory / name)

    def begin(self, mark: Mark, nonce: str, *, shared: bool) -> LocalFolder:
        """A place for the files of `mark` that no other writer has; not published. `shared`: other ranks write too."""
        folder = hidden(self.directory, mark, nonce)
        folder.mkdir(parents=True)
        return LocalFolder(folder)

    def publish(self, folder: Folder, manifest: Manifest) -> None:
        """Make it one of the checkpoints in one moment; no other one has that mark."""
        folder.write(MANIFEST, manifest.to_bytes())
        publish(_path(folder), manifest.mark)

    def abandon(self, folder: Folder) -> None:
        """Delete what `begin` began; nothing is raised."""
        # Other ranks may still write: what they add is swept by the next start.
        shutil.rmtree(_path(folder), ignore_errors=True)

    def set_aside(self, folder: Folder) -> None:
        """Keep what is torn or corrupt for people, but count it no more; nothing is raised."""
        with contextlib.suppress(OSError):
            path = _path(folder)
            target = path.with_name(path.name + CORRUPT_SUFFIX)
            if target.is_dir():
                shutil.rmtree(target)
            path.rename(target)

    def discard(self, folder: Folder) -> None:
        """Delete a checkpoint; killed in between, it leaves none that looks whole."""
        path = _path(folder)
        # Killed in between, it leaves a hidden folder, never a half-empty one that looks whole.
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        path.rename(old)
        shutil.rmtree(old)

    def sweep(self, generation: int) -> None:
        """Delete what killed writers of this and earlier generations left; a newer group's may be in the making."""
        for path in self.directory.glob(".generation-*"):
            match = _HIDDEN.match(path.name)
            if match is not None and int(match[1]) <= generation:
                shutil.rmtree(path, ignore_errors=True)

    def require_writable(self) -> None:
        """Write a small file and remove it."""
        name = f".writable-{secrets.token_hex(4)}"
        self.write_note(name, b"")
        (self.directory / name).unlink()

    def read_note(self, name: str) -> bytes | None:
        """A small file beside the checkpoints; None where it is not there."""
        try:
            # The user's own, and shared by runs perhaps.
            return read_regular(self.directory / name, NOTE_BYTES_MAX, follow=True)
        except FileNotFoundError:
            return None

    def write_note(self, name: str, content: bytes) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_durably(self.directory / name, content)


def hidden(directory: Path, mark: Mark, nonce: str) -> Path:
    """Where to write the checkpoint `mark` until it is whole; `nonce` keeps two writers of one mark apart."""
    return directory / f".{mark.folder_name}.{nonce}.writing"


def publish(folder: Path, mark: Mark) -> None:
    """Give the sealed `folder` its final name, durably; raises OSError, also where there is one of that name."""
    folder.rename(folder.with_name(mark.folder_name))
    sync_directory(folder.parent)


def _path(folder: Folder) -> Path:
    return cast(LocalFolder, folder).path
