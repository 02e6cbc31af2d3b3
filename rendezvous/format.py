"""Text of messages: lists, plurals, sizes, escapes; and errors that come from limits of the host."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Sequence

# Linux's HOST_NAME_MAX. As JSON such a name is shorter than `HOST_BYTES_MAX`.
_HOST_BYTES_MAX = 64


def listed(items: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else "".join(items)


def plural(count: int, noun: str) -> str:
    """ "1 restart", "2 restarts"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def node_host(hostname: str) -> str:
    """The host's name for keys, records and log lines: Linux allows any bytes, and these need printable characters."""
    name = "".join(letter if letter.isprintable() and letter not in " /" else "-" for letter in hostname)
    return name.encode()[:_HOST_BYTES_MAX].decode(errors="ignore") or "unnamed"


def plain(text: str, keep: str = "") -> str:
    """The text for a terminal: control characters, bidirectional ones too, are escaped, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def bytes_text(count: float) -> str:
    """The number of bytes in human-readable form: "512 B", "1.5 GiB", "64 MiB"."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    number = f"{size:.0f}" if size >= 100 else f"{size:.1f}".removesuffix(".0")
    return f"{number} {unit}"


def shortage(error: BaseException) -> str | None:
    """The limit that caused `error`, and how to raise it; None for any other error."""

    def limit(kind: int) -> str:
        allowed, _ = resource.getrlimit(kind)
        return "unlimited" if allowed == resource.RLIM_INFINITY else str(allowed)

    number = error.errno if isinstance(error, OSError) else errno.ENOMEM if isinstance(error, MemoryError) else None
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        number = errno.EAGAIN
    match number:
        # BlockingIOError of a non-blocking stream has the same errno, and has characters_written.
        case errno.EAGAIN if not hasattr(error, "characters_written"):
            return (
                f"user {os.geteuid()} may start no more processes or threads here (ulimit -u is"
                f" {limit(resource.RLIMIT_NPROC)}, and a container has pids.max); raise the limit, or end other"
                " processes"
            )
        case errno.EMFILE:
            return (
                f"elaunch may open no more files (ulimit -n is {limit(resource.RLIMIT_NOFILE)});"
                " raise the limit: ulimit -n 4096"
            )
        case errno.ENFILE:
            return "this host may open no more files (fs.file-max); end other processes, or raise the limit as root"
        case errno.ENOMEM:
            return (
                f"there is no more memory for elaunch itself (ulimit -v is {limit(resource.RLIMIT_AS)}, and a container"
                " has memory.max); give it more, or end other processes"
            )
    return None
