"""The folder of a run's checkpoints: what is in it, which is the newest, what is whole.

A checkpoint is a folder `generation-GGGG-step-SSSSSSSS`, made under a hidden name and renamed when all of it is on the
disk. Its `manifest.json` lists the other files with lengths and CRC-32. Before folders there were single files, `….pt`.

The order, generation before step, fences: what a group that should be gone still writes is older than anything of the
group that replaced it, however far it got.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaunch.trainer.files import parse_json, sync_directory, write_durably

MANIFEST = "manifest.json"
# The file that holds all of a state that is no tensor.
PLAIN = "plain.pt"
CORRUPT_SUFFIX = ".corrupt"
_FORMAT = 1
_NAME = re.compile(r"generation-(\d+)-step-(\d+)(\.pt)?")
_HIDDEN = re.compile(r"\.(generation-(\d+)-step-\d+)\.\w+\.(?:writing|old|replaced)")
_REPLACED = ".replaced"
_BLOCK_BYTES = 4 << 20


class Corrupt(ValueError):
    """The bytes of a checkpoint are not those that were written; nothing else proves that."""


@dataclass(frozen=True, order=True)
class Mark:
    """What names a checkpoint, and orders them."""

    generation: int
    step: int

    @property
    def folder_name(self) -> str:
        return f"generation-{self.generation:04d}-step-{self.step:08d}"

    @property
    def file_name(self) -> str:
        """The name of a single-file checkpoint."""
        return self.folder_name + ".pt"

    @classmethod
    def of(cls, path: Path) -> Mark | None:
        """The mark in a file's or folder's name; None where it is no checkpoint."""
        match = _NAME.fullmatch(path.name)
        return cls(int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself. `files`: length in bytes and CRC-32 of each by its name."""

    mark: Mark
    world_size: int
    files: dict[str, tuple[int, int]]


def found(directory: Path) -> list[tuple[Mark, Path]]:
    """All checkpoints in `directory`, whole or not, oldest first; none where there is no such directory."""
    try:
        return sorted((mark, path) for path in directory.iterdir() if (mark := Mark.of(path)))
    except (FileNotFoundError, NotADirectoryError):
        return []


def marks(directory: Path) -> list[Mark]:
    """The marks of all checkpoints in `directory`, whole or not, oldest first."""
    return [mark for mark, _ in found(directory)]


def unwritable(directory: Path) -> str:
    """Why nothing can be written to `directory`, which may yet have to be made; empty where it seems that it can."""
    try:
        there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    except OSError as error:
        return error.strerror or str(error)
    if not there.is_dir():
        return f"{there} is no directory"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} is read-only, or another user's"
    return ""


def fencing_generation(directory: Path, generation: int) -> int:
    """The generation to save under: this group's, but never below one already there.

    A job that is started anew on an old directory counts generations from the beginning again; its checkpoints must
    still be the newest.
    """
    return max([generation, *(mark.generation for mark in marks(directory))])


def hidden(directory: Path, mark: Mark, nonce: str) -> Path:
    """Where to write the checkpoint `mark` until it is whole; `nonce` keeps two writers of one mark apart."""
    return directory / f".{mark.folder_name}.{nonce}.writing"


def seal(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, when the files that it lists are on the disk; raises OSError."""
    record = {
        "format": _FORMAT,
        "generation": manifest.mark.generation,
        "step": manifest.mark.step,
        "world_size": manifest.world_size,
        "files": manifest.files,
    }
    write_durably(folder / MANIFEST, json.dumps(record, indent=1).encode() + b"\n")


def publish(folder: Path, mark: Mark) -> Path:
    """Give the sealed `folder` its final name, durably, in place of what may have it; raises OSError."""
    final = folder.with_name(mark.folder_name)
    replaced = None
    if final.exists():
        # Of the same generation and step: a job that was started anew and came this way again.
        replaced = final.rename(final.with_name(f".{final.name}.{os.getpid()}{_REPLACED}"))
    try:
        folder.rename(final)
    except OSError:
        if replaced is not None:
            with contextlib.suppress(OSError):
                replaced.rename(final)
        raise
    sync_directory(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`.

    Raises Corrupt where it is missing, torn or another checkpoint's, ValueError where it is a newer release's, OSError.
    """
    try:
        record = parse_json((folder / MANIFEST).read_bytes())
        form = record["format"]
        manifest = _manifest_of(record) if form == _FORMAT else None
    except (KeyError, TypeError, AttributeError, ValueError, FileNotFoundError) as error:
        raise Corrupt(f"its {MANIFEST} is missing or torn") from error
    if manifest is None:
        raise ValueError(f"its format is {form}, this release reads {_FORMAT}")
    if manifest.mark != Mark.of(folder):
        raise Corrupt(f"its {MANIFEST} is that of {manifest.mark.folder_name}")
    return manifest


def _manifest_of(record: dict[str, Any]) -> Manifest:
    """Raises KeyError, TypeError, AttributeError and ValueError."""
    mark = Mark(record["generation"], record["step"])
    files = {}
    for name, (length, crc) in record["files"].items():
        if type(length) is not int or type(crc) is not int or Path(name).name != name:
            raise ValueError(f"{name!r} is no file with its length and CRC")
        files[name] = (length, crc)
    if any(type(number) is not int for number in (mark.generation, mark.step, record["world_size"])):
        raise TypeError("the generation, the step or the world size is no number")
    return Manifest(mark, record["world_size"], files)


def verify(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read these files of a checkpoint; raises Corrupt at the first that is not what the manifest says, OSError."""
    for name in names:
        length, crc = manifest.files[name]
        try:
            found_length, found_crc = sums(folder / name)
        except FileNotFoundError:
            raise Corrupt(f"{name} is missing") from None
        if found_length != length:
            raise Corrupt(f"{name} has {found_length} bytes, not {length}")
        if found_crc != crc:
            raise Corrupt(f"{name} has the CRC-32 {found_crc:08x}, not {crc:08x}")


def sums(path: Path) -> tuple[int, int]:
    """Length in bytes and CRC-32 of a file; raises OSError."""
    length = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            length += len(block)
            crc = zlib.crc32(block, crc)
    return length, crc


def set_aside(path: Path) -> None:
    """Rename what is torn or corrupt, so that it is neither counted nor complained about again."""
    with contextlib.suppress(OSError):
        target = path.with_name(path.name + CORRUPT_SUFFIX)
        if target.is_dir():
            shutil.rmtree(target)
        path.rename(target)


def keep_newest(directory: Path, count: int, published: Mark) -> None:
    """Delete all but the `count` newest checkpoints and the one just published, as far as the disk lets us."""
    for mark, path in found(directory)[:-count]:
        # Newer ones that could not be read may be in the way of the only one that can.
        if mark != published:
            with contextlib.suppress(OSError):
                discard(path)


def discard(path: Path) -> None:
    """Delete a checkpoint; killed in between, it leaves a hidden folder, never a half-empty one that looks whole."""
    if path.is_dir():
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        path.rename(old)
        shutil.rmtree(old)
    else:
        path.unlink()


def restore_replaced(directory: Path) -> None:
    """Give checkpoints their names back whose writer was killed before the one in their place had it."""
    for path in directory.glob(f".generation-*{_REPLACED}"):
        if (match := _HIDDEN.fullmatch(path.name)) and not path.with_name(match[1]).exists():
            with contextlib.suppress(OSError):
                path.rename(path.with_name(match[1]))


def sweep_hidden(directory: Path, generation: int) -> None:
    """Remove what killed writers of this and earlier generations left; a newer group's may be in the making."""
    for path in directory.glob(".generation-*"):
        match = _HIDDEN.fullmatch(path.name)
        if match is None or int(match[2]) > generation:
            continue
        # One that could not have its name back is a checkpoint still.
        if not path.name.endswith(_REPLACED) or path.with_name(match[1]).exists():
            shutil.rmtree(path, ignore_errors=True)
