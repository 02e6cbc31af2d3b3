"""The checkpoints in a run's storage: which is the newest, which is whole, which may go."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable

from elaunch.trainer.checkpoint.manifest import MANIFEST, METADATA, PLAIN, Corrupt, Manifest, Mark
from elaunch.trainer.checkpoint.storage import MANIFEST_BYTES_MAX, Folder, Storage, Where, storage_at

__all__ = [
    "MANIFEST",
    "METADATA",
    "PLAIN",
    "Corrupt",
    "Manifest",
    "Mark",
    "fencing_generation",
    "found",
    "keep_newest",
    "marks",
    "read_manifest",
    "read_verified",
    "verify",
]


def found(where: Where) -> list[tuple[Mark, Folder]]:
    """All published checkpoints, whole or not, oldest first; none where there is no such place."""
    return storage_at(where).found()


def marks(where: Where) -> list[Mark]:
    """The marks of all published checkpoints, whole or not, oldest first."""
    return [mark for mark, _ in found(where)]


def fencing_generation(storage: Storage, generation: int) -> int:
    """The generation to save under: this group's, but never below one already there.

    A job that is started anew on an old directory counts generations from the beginning again; its checkpoints must
    still be the newest.
    """
    return max([generation, *(mark.generation for mark in marks(storage))])


def read_manifest(folder: Folder) -> Manifest:
    """The manifest in `folder`.

    Raises Corrupt where it is missing, torn or another checkpoint's, ValueError where it is a newer release's, OSError.
    """
    try:
        manifest = Manifest.from_bytes(folder.read(MANIFEST, MANIFEST_BYTES_MAX))
    except FileNotFoundError as error:
        raise Corrupt(f"its {MANIFEST} is missing or torn") from error
    # An object store has the attempt behind the mark.
    if folder.name.partition(".")[0] != manifest.mark.folder_name:
        raise Corrupt(f"its {MANIFEST} is that of {manifest.mark.folder_name}")
    return manifest


def verify(folder: Folder, manifest: Manifest, names: Iterable[str]) -> None:
    """Read these files of a checkpoint; raises Corrupt at the first that is not what the manifest says, OSError."""
    for name in names:
        try:
            sums = folder.sums(name)
        except FileNotFoundError:
            raise Corrupt(f"{name} is missing") from None
        _require_sums(manifest, name, sums)


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
