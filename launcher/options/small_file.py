"""Reads text files safely: a path from elsewhere may lead to a pipe, a device or a huge file."""

from __future__ import annotations

import errno
import os
import stat

BYTES_MAX = 16 << 20


def read_small(path: str, *, may_be_pipe: bool = False) -> str:
    """The text in a file. Raises OSError, also if it is no regular file or too large, and UnicodeDecodeError.

    With `may_be_pipe` it may also be a pipe, as in `--config <(make-it)`.
    """
    # Without O_NONBLOCK, `open` of a pipe waits until a program writes to it.
    flags = 0 if may_be_pipe else os.O_NONBLOCK
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except ValueError:
        raise OSError(errno.ENOENT, "no file can have this name", path) from None
    with open(fd, "rb") as file:  # noqa: PTH123
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not (stat.S_ISREG(mode) or (may_be_pipe and stat.S_ISFIFO(mode))):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        content = file.read(BYTES_MAX + 1)
    if len(content) > BYTES_MAX:
        raise OSError(errno.EFBIG, f"it has more than {BYTES_MAX >> 20} MiB", path)
    return content.decode()
