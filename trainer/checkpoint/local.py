"""Files of checkpoints in a folder of a file system."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from elaunch.trainer.files import open_regular, read_regular, sync_directory, write_durably


class LocalFiles:
    """The files in `root`, which is made when something is written. Its methods raise OSError."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        """For people, without secrets."""
        return str(self._root)

    @property
    def name(self) -> str:
        """By which another rank finds it `below` the same place."""
        return self._root.name

    @property
    def is_link(self) -> bool:
        """Whether the root is a symbolic link."""
        return self._root.is_symlink()

    def below(self, name: str) -> LocalFiles:
        """A folder in it."""
        return LocalFiles(self._root / name)

    def names(self) -> list[str]:
        """The names in the root; none if there is no such place."""
        try:
            return [path.name for path in self._root.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int | None:
        """In bytes; None if it is not there."""
        try:
            return (self._root / name).lstat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, name: str, bytes_max: int) -> bytes:
        """All of a file. Raises FileNotFoundError, and OSError with a sentence if it is larger."""
        return read_regular(self._root / name, bytes_max)

    def open(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A file to be read, with `seek`."""
        return open_regular(self._root / name)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """A file to be written from beginning to end; durable when the context is left."""
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
        """Make the names of the files durable, and that of the folder itself."""
        sync_directory(self._root)
        sync_directory(self._root.parent)

    def remove(self, name: str) -> None:
        (self._root / name).unlink()

    def remove_all(self) -> None:
        """Delete the folder, and all that is in it."""
        shutil.rmtree(self._root)
