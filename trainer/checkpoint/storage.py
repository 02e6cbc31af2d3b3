"""The checkpoints of a run, and the seam to the place where they lie: a folder, or an object store.

A `Storage` finds, publishes and deletes whole checkpoints; a `Folder` is one of them, and holds files. What is behind
it may not rename (an object store cannot): how a checkpoint becomes whole in one moment is the storage's own business.

The order of checkpoints, generation before step, fences: what a group that should be gone still writes is older than
anything of the group that replaced it, however far it got.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

from elaunch.strict_json import parse_json
from elaunch.trainer.state.version import Version

if TYPE_CHECKING:
    # Both import this module.
    from elaunch.trainer.checkpoint.local import LocalFolder, LocalStorage
    from elaunch.trainer.checkpoint.objects import ObjectFolder, ObjectStorage

MANIFEST = "manifest.json"
# The file that holds all of a state that is no tensor.
PLAIN = "plain.pt"
# Where each tensor lies: DCP's account, for its tools, and the same as JSON, which is read here.
LAYOUT = "tensors.json"
_FORMAT = 1
_NAME = re.compile(r"generation-(\d+)-step-(\d+)")
# Limits of files that are read as a whole. Without them the writer of a folder chooses how much memory a read takes.
# A line of the manifest is about 60 bytes for each rank, the layout about 100 for each piece of a tensor.
MANIFEST_BYTES_MAX = 64 << 20
LAYOUT_BYTES_MAX = PLAIN_BYTES_MAX = 1 << 30
NOTE_BYTES_MAX = 16 << 20
_BLOCK_BYTES = 4 << 20


class Corrupt(ValueError):
    """The bytes of a checkpoint are not those that were written; nothing else proves that."""


class Mark(Version):
    """What names a checkpoint, and orders them."""

    @property
    def folder_name(self) -> str:
        return f"generation-{self.generation:04d}-step-{self.step:08d}"

    @classmethod
    def of(cls, path: PurePath) -> Mark | None:
        """The mark in a folder's name; None where it is no checkpoint."""
        match = _NAME.fullmatch(path.name)
        return cls(int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself. `files`: length in bytes and CRC-32 of each by its name."""

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
        """Raises Corrupt where it is torn, ValueError where it is a newer release's."""
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
            raise ValueError(f"{name!r} is no file with its length and CRC")
        files[name] = (length, crc)
    if any(type(number) is not int for number in (mark.generation, mark.step, record["world_size"])):
        raise TypeError("the generation, the step or the world size is no number")
    return Manifest(mark, record["world_size"], files)


# The files of one checkpoint, and where the checkpoints of one run lie; `local` says what each method does. All of them
# raise OSError. `str()` is for people, without secrets.
Folder: TypeAlias = "LocalFolder | ObjectFolder"
Storage: TypeAlias = "LocalStorage | ObjectStorage"
Where: TypeAlias = "str | os.PathLike[str] | Storage"


class StorageError(OSError):
    """The storage does not do what was asked for; `strerror` is the reason alone, `str()` names the URL too."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def storage_at(where: Where) -> Storage:
    """The storage that a path, a URL (`s3://bucket/run`) or a storage itself names.

    Nothing is touched yet. Raises ValueError with a sentence for a URL that cannot be meant.
    """
    if not isinstance(where, str | os.PathLike):
        return where
    # Both import this module.
    from elaunch.trainer.checkpoint.local import LocalStorage
    from elaunch.trainer.checkpoint.objects import ObjectStorage, parse

    url = parse(os.fspath(where))
    return LocalStorage(url) if isinstance(url, Path) else ObjectStorage(url)


def marks(where: Where) -> list[Mark]:
    """The marks of all published checkpoints, whole or not, oldest first."""
    return [mark for mark, _ in storage_at(where).found()]


def read_manifest(folder: Folder) -> Manifest:
    """The manifest in `folder`.

    Raises Corrupt where it is missing, torn or another checkpoint's, ValueError where it is a newer release's, OSError.
    """
    try:
        manifest = Manifest.from_bytes(folder.read(MANIFEST, MANIFEST_BYTES_MAX))
    except FileNotFoundError as error:
        raise Corrupt(f"its {MANIFEST} is missing or torn") from error
    # In an object store a random number is behind the mark.
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
    """Read these files of a checkpoint; raises Corrupt at the first that is not what the manifest says, OSError."""
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
    """Delete all but the `count` newest checkpoints and the one just published, as far as the storage lets us."""
    for mark, folder in storage.found()[:-count]:
        # Newer ones that could not be read may be in the way of the only one that can.
        if mark != published:
            with contextlib.suppress(OSError):
                storage.discard(folder)
