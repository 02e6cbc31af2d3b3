"""The checkpoints of a run, in a folder or an object store: published by their manifest, without a rename.

A checkpoint is all files below `generation-GGGG-step-SSSSSSSS.NNNNNNNN/`. N is random: no two writers ever write the
same file. `manifest.json` is written last, once all files that it lists are there, and deleted first. Files without it
are not a checkpoint.

The order of checkpoints, generation before step, is a fence: what a replaced group still writes is older than anything
of its successor, whatever its step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from elaunch.strict_json import parse_json
from elaunch.trainer.checkpoint.filesystem import LocalFiles, ObjectFiles, StorageError, parse
from elaunch.trainer.state import Version

MANIFEST = "manifest.json"
# Replaces the manifest of a corrupt checkpoint.
_SET_ASIDE = "manifest.corrupt.json"
# The file that holds all of a state that is not a tensor.
PLAIN = "plain.pickle"
# Where each tensor lies, as JSON; DCP's tools have `.metadata`.
LAYOUT = "tensors.json"
_FORMAT = 1
_NAME = re.compile(r"generation-(\d+)-step-(\d+)\.[0-9a-f]{8}")
# Limits of files that are read as a whole. Without them the writer of a folder chooses how much memory a read takes.
# A line of the manifest is about 60 bytes for each rank, the layout about 100 for each piece of a tensor.
MANIFEST_BYTES_MAX = 64 << 20
LAYOUT_BYTES_MAX = PLAIN_BYTES_MAX = 1 << 30
NOTE_BYTES_MAX = 16 << 20
_BLOCK_BYTES = 4 << 20


class Corrupt(ValueError):
    """The bytes of a checkpoint are not those that were written; no other error proves that."""


class Mark(Version):
    """The name of a checkpoint, and its order."""

    @property
    def folder_name(self) -> str:
        return f"generation-{self.generation:04d}-step-{self.step:08d}"

    @classmethod
    def of(cls, name: str) -> Mark | None:
        """The mark in a folder's name; None if it is not a checkpoint's."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint. `files`: length in bytes and CRC-32 of each by its name."""

    mark: Mark
    world_size: int
    files: dict[str, tuple[int, int]]

    def to_bytes(self) -> bytes:
        record = {
            "format": _FORMAT,
            "generation": self.mark.generation,
            "step": self.mark.step,
            "world_size": self.world_size,
            "files": self.files,
        }
        return json.dumps(record, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Raises Corrupt if it is torn, ValueError if it is a newer release's."""
        try:
            record = parse_json(content)
            form = record["format"]
            manifest = _manifest_of(record) if form == _FORMAT else None
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Corrupt(f"its {MANIFEST} is missing or torn") from error
        if manifest is None:
            raise ValueError(f"its format is {form}, this release reads {_FORMAT}")
        return manifest


def _manifest_of(record: dict[str, Any]) -> Manifest:
    """Raises KeyError, TypeError, AttributeError and ValueError."""
    mark = Mark(record["generation"], record["step"])
    files = {}
    for name, (length, crc) in record["files"].items():
        if type(length) is not int or type(crc) is not int or name in ("", ".", "..") or set(name) & {"/", "\0"}:
            raise ValueError(f"{name!r} is not a file with its length and CRC")
        files[name] = (length, crc)
    if any(type(number) is not int for number in (mark.generation, mark.step, record["world_size"])):
        raise TypeError("the generation, the step or the world size is not an integer")
    return Manifest(mark, record["world_size"], files)


# The folder of one attempt to write a checkpoint.
Folder: TypeAlias = LocalFiles | ObjectFiles


def is_published(folder: Folder) -> bool:
    """Whether it is a checkpoint. One in a folder that cannot be listed counts: reading it raises the reason."""
    try:
        return folder.size(MANIFEST) is not None
    except StorageError:
        raise
    except OSError:
        return True


def discard(folder: Folder) -> None:
    """Delete it; a kill in between leaves none that appears whole. A link's target stays. Raises OSError."""
    if folder.is_link:
        return
    if folder.size(MANIFEST) is not None:
        folder.remove(MANIFEST)
    folder.remove_all()


def set_aside(folder: Folder) -> None:
    """Unpublish a corrupt checkpoint, but keep its files for inspection; nothing is raised."""
    with contextlib.suppress(OSError):
        folder.write(_SET_ASIDE, folder.read(MANIFEST, MANIFEST_BYTES_MAX))
        folder.remove(MANIFEST)


class Storage:
    """Where the checkpoints of one run lie. All methods raise OSError. `str()` has no secrets."""

    def __init__(self, files: Folder) -> None:
        self.files = files

    def __str__(self) -> str:
        return str(self.files)

    @property
    def is_local(self) -> bool:
        """Whether it is a directory, which may be a different one on each node."""
        return isinstance(self.files, LocalFiles)

    def found(self) -> list[tuple[Mark, Folder]]:
        """All published checkpoints, whole or not, oldest first; none if the location does not exist."""
        return [(mark, folder) for mark, folder in self._attempts() if is_published(folder)]

    def folder(self, name: str) -> Folder:
        return self.files.below(name)

    def begin(self, mark: Mark) -> Folder:
        """A new, unpublished folder for the files of `mark`, which no other writer has."""
        return self.folder(f"{mark.folder_name}.{secrets.token_hex(4)}")

    def publish(self, folder: Folder, manifest: Manifest) -> None:
        """Check its files' sizes, then publish it atomically."""
        for name, (length, _) in manifest.files.items():
            if (size := folder.size(name)) != length:
                there = "is not there" if size is None else f"has {size} bytes there"
                raise StorageError(
                    None,
                    f"{name} {there} after {length} bytes were written; another start has cleaned it up, or that rank "
                    "has another directory of that name (the checkpoints of a sharded state need one that all share)",
                    str(self),
                )
        folder.sync()
        folder.write(MANIFEST, manifest.to_bytes())

    def sweep(self, generation: int) -> list[str]:
        """Delete what killed writers of this and earlier generations left; a newer group may still be writing its own.

        Returns the names of the deleted folders.
        """
        swept = []
        for mark, folder in self._attempts():
            with contextlib.suppress(OSError):
                is_kept = is_published(folder) or folder.size(_SET_ASIDE) is not None or folder.is_link
                if mark.generation <= generation and not is_kept:
                    discard(folder)
                    swept.append(folder.name)
        return swept

    def require_writable(self) -> None:
        """Write a small file and remove it."""
        name = f".writable-{secrets.token_hex(4)}"
        self.files.write(name, b"")
        self.files.remove(name)

    def read_note(self, name: str) -> bytes | None:
        """A small file beside the checkpoints; None if there is none."""
        try:
            return self.files.read(name, NOTE_BYTES_MAX)
        except FileNotFoundError:
            return None

    def _attempts(self) -> list[tuple[Mark, Folder]]:
        """All existing folders of checkpoints, published or not, oldest first."""
        begun = [(mark, self.folder(name)) for name in self.files.names() if (mark := Mark.of(name))]
        return sorted(begun, key=lambda each: (each[0], each[1].name))


Where: TypeAlias = str | os.PathLike[str] | Storage


def storage_at(where: Where) -> Storage:
    """The storage that a path, a URL (`s3://bucket/run`) or a storage itself names.

    The storage is not accessed. Raises ValueError with a sentence for an invalid URL.
    """
    if isinstance(where, Storage):
        return where
    url = parse(os.fspath(where))
    return Storage(LocalFiles(url) if isinstance(url, Path) else ObjectFiles(url))


def marks(where: Where) -> list[Mark]:
    """The marks of all published checkpoints, whole or not, oldest first."""
    return [mark for mark, _ in storage_at(where).found()]


def read_manifest(folder: Folder) -> Manifest:
    """The manifest in `folder`.

    Raises Corrupt if it is missing, torn or another checkpoint's, ValueError if it is a newer release's, OSError.
    """
    try:
        manifest = Manifest.from_bytes(folder.read(MANIFEST, MANIFEST_BYTES_MAX))
    except FileNotFoundError as error:
        raise Corrupt(f"its {MANIFEST} is missing or torn") from error
    if folder.name.partition(".")[0] != manifest.mark.folder_name:
        raise Corrupt(f"its {MANIFEST} is that of {manifest.mark.folder_name}")
    return manifest


def sums(folder: Folder, name: str) -> tuple[int, int]:
    """Length in bytes and CRC-32 of a file; raises FileNotFoundError, OSError."""
    length = crc = 0
    with folder.open(name) as file:
        while block := file.read(_BLOCK_BYTES):
            length += len(block)
            crc = zlib.crc32(block, crc)
    return length, crc


def verify(folder: Folder, manifest: Manifest, names: Iterable[str]) -> None:
    """Read these files of a checkpoint; raises Corrupt at the first that differs from the manifest, OSError."""
    for name in names:
        try:
            found_sums = sums(folder, name)
        except FileNotFoundError:
            raise Corrupt(f"{name} is missing") from None
        _require_sums(manifest, name, found_sums)


def read_verified(folder: Folder, manifest: Manifest, name: str, bytes_max: int) -> bytes:
    """A file of a checkpoint, which is read once: what is verified is what is returned. Raises as `verify` does."""
    if name not in manifest.files:
        raise Corrupt(f"its {MANIFEST} has no {name}")
    try:
        content = folder.read(name, bytes_max)
    except FileNotFoundError:
        raise Corrupt(f"{name} is missing") from None
    _require_sums(manifest, name, (len(content), zlib.crc32(content)))
    return content


def _require_sums(manifest: Manifest, name: str, sums: tuple[int, int]) -> None:
    (length, crc), (found_length, found_crc) = manifest.files[name], sums
    if found_length != length:
        raise Corrupt(f"{name} has {found_length} bytes, not {length}")
    if found_crc != crc:
        raise Corrupt(f"{name} has the CRC-32 {found_crc:08x}, not {crc:08x}")


def keep_newest(storage: Storage, count: int, published: Mark) -> None:
    """Delete all but the `count` newest checkpoints and the one just published, as far as the storage allows."""
    for mark, folder in storage.found()[:-count]:
        # All newer ones may be unreadable, and the one just published the only readable one.
        if mark != published:
            with contextlib.suppress(OSError):
                discard(folder)
