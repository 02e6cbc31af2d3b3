"""Durable writes, complete or absent even after a power loss; reads of files that others may have put there."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

TEMPORARY_SUFFIX = ".tmp"


def write_durably(path: Path, content: bytes) -> None:
    """Put `content` at `path` so that a reader sees the old file or the new one, never a part; raises OSError.

    Temporary file in the same directory, fsync, rename, fsync of the directory. A process killed in between leaves a
    hidden temporary file behind, which `sweep` removes.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    # The directory is opened first: another process may rename it as soon as the file is there.
    with _synced(path.parent):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def open_regular(path: Path, *, follow: bool = False) -> IO[bytes]:
    """Open a file that others may have put there; a symbolic link only with `follow`.

    Raises OSError with a sentence if it is not a regular file: a pipe would wait for its writer, a device has no end.
    """
    if not follow and path.is_symlink():
        raise OSError(f"{path.name} is a symbolic link; put the file itself there")
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path.name} is not a regular file")
        return open(descriptor, "rb")  # noqa: PTH123
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, bytes_max: int, *, follow: bool = False) -> bytes:
    """The content of such a file. Raises OSError with a sentence if it has more than `bytes_max` bytes."""
    with open_regular(path, follow=follow) as file:
        require_size(path.name, os.fstat(file.fileno()).st_size, bytes_max)
        # Another process may still write to it.
        content = file.read(bytes_max + 1)
    require_size(path.name, len(content), bytes_max)
    return content


def require_size(name: str, size: int, bytes_max: int) -> None:
    """Raise OSError with a sentence if a file has more than `bytes_max` bytes."""
    if size > bytes_max:
        raise OSError(f"{name} has {size:,} bytes, more than the limit of {bytes_max:,}")


def reason(error: BaseException) -> str:
    """What went wrong, in one line: the system's message, or the error's own, or its type."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return next(iter(text.strip().splitlines()), "") or type(error).__name__


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable."""
    with _synced(directory):
        pass


@contextlib.contextmanager
def _synced(directory: Path) -> Iterator[None]:
    """Make the names in `directory` durable when the body has succeeded, even if it renames `directory`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(directory: Path) -> None:
    """Remove the temporary files of killed writers."""
    for temporary in directory.glob(f".*{TEMPORARY_SUFFIX}"):
        temporary.unlink(missing_ok=True)
