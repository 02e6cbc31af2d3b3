"""Where warm fork servers of this user listen: a folder that only the user can enter, and a socket for each kind."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from elaunch.rendezvous.job_spec import Program
from elaunch.rendezvous.texts import plain

_ADDRESS_BYTES_MAX = 107
# Another one for each change of the messages: releases of one installation do not meet.
_PROTOCOL = "1"


class NoPlace(Exception):
    """No warm fork server can be used or begun here; the text says why, and the way out."""


def folder(environ: Mapping[str, str]) -> Path:
    """The user's folder, which need not exist."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    # sudo and su may keep the variable: a folder of root's would stand in the user's way there.
    if os.path.isabs(runtime) and _is_own_folder(Path(runtime)):  # noqa: PTH117
        return Path(runtime, "elaunch_warm")
    return Path("/tmp", f"elaunch_warm_{os.geteuid()}")


def _is_own_folder(path: Path) -> bool:
    with suppress(OSError):
        found = path.stat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def checked(place: Path) -> Path | None:
    """`place` if it is there and nobody else can enter it; None if it is not there. Raises NoPlace."""
    try:
        found = place.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoPlace(f"{place} cannot be looked at ({error.strerror})") from error
    if not stat.S_ISDIR(found.st_mode):
        raise NoPlace(f"{place} is no folder; remove it")
    if found.st_uid != os.geteuid():
        raise NoPlace(f"{place} belongs to the user with id {found.st_uid}; have it removed, or set XDG_RUNTIME_DIR")
    if found.st_mode & 0o077:
        raise NoPlace(f"others may enter {place} (mode {found.st_mode & 0o777:o}); remove it, or chmod 700 {place}")
    return place


def made(place: Path) -> Path:
    """`place`, made if it is not there. Raises NoPlace."""
    try:
        place.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        # Something else has the name.
        pass
    except OSError as error:
        raise NoPlace(f"{place} cannot be made ({error.strerror}); set XDG_RUNTIME_DIR to another folder") from error
    checked(place)
    return place


def socket_path(place: Path, program: Program, preload: Sequence[str]) -> Path:
    """The socket of the fork server for programs of that kind, with that interpreter and these modules.

    Raises NoPlace where the path is longer than a socket's address may be.
    """
    # Containers may share the folder: a server of another one can be neither used nor ended.
    container = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    kind = [
        container,
        program.interpreter,
        *program.interpreter_options,
        program.kind.value,
        *preload,
        __file__,
        _PROTOCOL,
    ]
    path = place / sha256(json.dumps(kind).encode()).hexdigest()[:16]
    if len(os.fsencode(path)) > _ADDRESS_BYTES_MAX:
        raise NoPlace(f"the path {path} is too long for a socket; set XDG_RUNTIME_DIR to a shorter folder")
    return path


def reason_file(path: Path) -> Path:
    """Where a fork server that has found out that it cannot stay at the socket `path` says why."""
    return path.with_suffix(".why")


def cannot_stay(path: Path, why: str) -> None:
    """Say to the next job why no fork server is there."""
    with suppress(OSError):
        reason_file(path).write_text(why, errors="replace")


def why_it_could_not_stay(path: Path) -> str:
    """The reason; empty if none was said."""
    with suppress(OSError):
        return plain(reason_file(path).read_text(errors="replace"))
    return ""
