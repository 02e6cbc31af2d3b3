"""Text from many files as one long sequence of bytes. Only the requested bytes are read."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from elaunch.trainer.gpt.config import ConfigError, TrainConfig

HELD_OUT_SHARE = 0.05

# Not the standard library's own text: installed packages, and tests, which some distributions leave out.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class File:
    """A file below the corpus's root: its relative path, and its size in bytes when the corpus was listed."""

    name: str
    size: int


class Corpus:
    """The files below `root` joined end to end, in an order that depends only on their names.

    They are ordered by the hashes of their names, so that the held-out tail is a sample of all files. Opening a corpus
    lists names and sizes, and opens no file.
    """

    def __init__(self, root: Path, files: list[File]) -> None:
        self.root = root
        self.files = sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.name)).digest())
        self._ends = list(accumulate(file.size for file in self.files))
        self._folder = os.fspath(root)

    @classmethod
    def open(cls, config: TrainConfig) -> Corpus:
        """List the text that `config` names. Raises ConfigError if it is missing or too short to train on."""
        root = config.data if config.data is not None else Path(sysconfig.get_path("stdlib"))
        if not root.exists():
            raise ConfigError(f"--data {root} does not exist; give a directory with text files")
        found = _stdlib_sources(root) if config.data is None else _walk(root, lambda name: not name.startswith("."))
        try:
            corpus = cls(root, [file for file in found if file.size])
        except OSError as error:
            raise ConfigError(
                f"cannot list {error.filename}: {error.strerror}; give --data a readable directory"
            ) from error
        wanted = 2 * (config.context + 1)
        if corpus.held_out_start < wanted or corpus.size - corpus.held_out_start < config.context + 1:
            least = max(wanted, int((config.context + 1) / HELD_OUT_SHARE) + 1)
            raise ConfigError(
                f"the text below {root} ({len(corpus.files)} files, {corpus.size} bytes) is too short; windows of "
                f"--context {config.context} need at least {least} bytes, so give --data more text"
            )
        return corpus

    @property
    def size(self) -> int:
        """The total in bytes."""
        return self._ends[-1] if self._ends else 0

    @property
    def held_out_start(self) -> int:
        """Where the held-out tail begins; training reads only the bytes before it."""
        return self.size - int(self.size * HELD_OUT_SHARE)

    @property
    def digest(self) -> str:
        """A fingerprint of the names and sizes: 15 hex digits, so that it fits a signed 64-bit integer."""
        rows = "".join(f"{file.size} {file.name}\0" for file in self.files)
        return hashlib.sha256(os.fsencode(rows)).hexdigest()[:15]

    @property
    def summary(self) -> str:
        """What two runs must have in common, readable: `612 files, 12345678 bytes, 0123456789abcde`."""
        return f"{len(self.files)} files, {self.size} bytes, {self.digest}"

    def read(self, start: int, length: int) -> bytes:
        """The `length` bytes from offset `start`, across file boundaries. Raises ConfigError if a file has changed."""
        parts = []
        index = bisect_right(self._ends, start)
        while length > 0:
            offset = start - (self._ends[index] - self.files[index].size)
            part = self._read_file(index, offset, min(length, self.files[index].size - offset))
            parts.append(part)
            start, length, index = start + len(part), length - len(part), index + 1
        return b"".join(parts)

    def require_same(self, summary: str) -> None:
        """Raise ConfigError if this rank's text is not rank 0's: nodes may have different disks, or Pythons."""
        if self.summary != summary:
            raise ConfigError(
                f"the text below {self.root} ({self.summary}) is not rank 0's ({summary}); give all the same --data"
            )

    def _read_file(self, index: int, offset: int, length: int) -> bytes:
        # pathlib and file objects are slower: a step reads many windows, and the GPU may wait for the first one.
        name = self.files[index].name
        path = f"{self._folder}/{name}" if name else self._folder
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                part = os.pread(descriptor, length, offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; make it readable or leave it out") from error
        if len(part) < length:
            raise ConfigError(f"{path} has become shorter than the {self.files[index].size} bytes it had at the start")
        return part


def _stdlib_sources(root: Path) -> Iterator[File]:
    return (file for file in _walk(root, lambda name: name not in _NOT_LIBRARY) if file.name.endswith(".py"))


def _walk(root: Path, wanted: Callable[[str], bool]) -> Iterator[File]:
    """The regular files below `root` by name, including links to files. Links to directories could form cycles."""
    if root.is_file():
        yield File("", root.stat().st_size)
        return
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = filter(wanted, folders)
        inside = Path(folder).relative_to(root)
        for path in map(Path(folder).joinpath, filter(wanted, names)):
            if path.is_file():
                yield File(str(inside / path.name), path.stat().st_size)


def _raise(error: OSError) -> None:
    raise error
