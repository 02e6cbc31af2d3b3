"""Whether the files that a fork server has loaded are still the same."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_FUTURE_NS = 3600 * 10**9
# The installer's record of a package; its version is in the name.
_RECORDS = (".dist-info", ".egg-info")
# Names of environment variables, as C code has them for getenv.
_NAME = re.compile(rb"\0([A-Z][A-Z0-9_]{2,63})(?=\0)")


@dataclass(frozen=True)
class Loaded:
    """The files of this process's modules and libraries (`stamps`, by path), and what could hide one of its modules.

    `names` are the top-level names of its modules. `beside` are, for each folder of `sys.path`, the entries with such a
    name. `packages` is the state of the installed packages. `pth` is the text of the .pth files.
    """

    stamps: dict[str, tuple[int, int, int] | None]
    names: frozenset[str]
    beside: dict[str, tuple[str, ...]]
    packages: tuple[tuple[str, ...], ...]
    pth: str

    @classmethod
    def now(cls, modules: Mapping[str, ModuleType], opened: Iterable[str] = ()) -> Loaded:
        """Of these modules, which may be hidden. They have `opened` these files, which need not exist."""
        names = frozenset(name.partition(".")[0] for name in modules)
        files = {_on_disk(file) for each in modules.values() if isinstance(file := _file(each), str)}
        texts = _pth_files()
        paths = {*files, *libraries(), *texts, os.path.realpath(sys.executable), *_settings()}
        return cls(
            {path: _stamp(path) for path in opened} | {path: stamp for path in paths if (stamp := _stamp(path))},
            names,
            {folder: _beside(folder, names) for folder in sys.path},
            state_of_packages(),
            "\n".join(texts.values()),
        )

    def change(self) -> str:
        """A sentence about what has changed since; empty if nothing has."""
        for path, stamp in self.stamps.items():
            if _stamp(path) != stamp:
                return f"{path} has changed"
        for folder, entries in self.beside.items():
            if other := {*_beside(folder, self.names)} ^ {*entries}:
                return f"{Path(folder, min(other))} was added or removed"
        return "" if state_of_packages() == self.packages else "packages were installed, upgraded or removed"

    def newer_than(self, time_ns: int) -> str:
        """A file that was written after that time; empty if none.

        A date that is far in the future comes from an archive, and tells nothing of when the file was written.
        """
        until_ns = time.time_ns() + _FUTURE_NS
        return next((path for path, stamp in self.stamps.items() if stamp and time_ns < stamp[0] < until_ns), "")


def _file(module: object) -> object:
    # Entries may be anything. A lazy module would import more if it were asked for an attribute that it lacks.
    return getattr(module, "__dict__", {}).get("__file__")


def _on_disk(file: str) -> str:
    """The file; the archive that it is in, if a module comes from one."""
    path = file
    while path and not os.path.exists(path):  # noqa: PTH110
        path = os.path.dirname(path.rstrip("/"))  # noqa: PTH120
        if path == "/":
            return file
    return path if os.path.isfile(path) else file  # noqa: PTH113


def libraries() -> set[str]:
    """The files that are mapped into this process as code."""
    found: set[str] = set()
    with open("/proc/self/maps", errors="surrogateescape") as maps:  # noqa: PTH123
        for line in maps:
            words = line.rstrip("\n").split(maxsplit=5)
            if len(words) == 6 and words[5].startswith("/") and "x" in words[1]:
                found.add(words[5])
    return found


def names_in(paths: Iterable[str]) -> set[str]:
    """All words in the constants of ELF files that may be names of environment variables."""
    # Imported here: only a fork server that stays needs these.
    import mmap
    import struct

    found: set[str] = set()
    for path in paths:
        with (
            suppress(OSError, ValueError, struct.error),
            open(path, "rb") as file,  # noqa: PTH123
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data,
        ):
            for offset, size in _constants(data, struct.unpack_from):
                found.update(name.decode() for name in _NAME.findall(b"\0" + data[offset : offset + size]))
    return found


def _constants(content: Any, unpack: Any) -> list[tuple[int, int]]:
    """The places of the sections `.rodata*` in a 64-bit little-endian ELF file (elf(5)); none in another file."""
    if content[:6] != b"\x7fELF\x02\x01":
        return []
    (table,) = unpack("<Q", content, 40)
    size, count, strings = unpack("<HHH", content, 58)
    sections = [unpack("<IIQQQQ", content, table + number * size) for number in range(count)]
    names = sections[strings][4]
    return [(each[4], each[5]) for each in sections if content[names + each[0] :][:7] == b".rodata"]


def _stamp(path: str) -> tuple[int, int, int] | None:
    with suppress(OSError, ValueError):
        status = os.stat(path)  # noqa: PTH116
        return status.st_mtime_ns, status.st_size, status.st_ino
    return None


def _beside(folder: str, names: Set[str]) -> tuple[str, ...]:
    with suppress(OSError):
        return tuple(sorted(entry for entry in os.listdir(folder) if entry.partition(".")[0] in names))  # noqa: PTH208
    return ()


def _pth_files() -> dict[str, str]:
    texts: dict[str, str] = {}
    for folder in sys.path:
        with suppress(OSError):
            for name in os.listdir(folder):  # noqa: PTH208
                if name.endswith(".pth"):
                    texts[f"{folder}/{name}"] = Path(folder, name).read_text(errors="replace")
    return texts


def _settings() -> list[str]:
    """The file that makes an environment of this interpreter (PEP 405)."""
    return [os.path.join(place, "pyvenv.cfg") for place in {sys.prefix, os.path.dirname(sys.executable)}]  # noqa: PTH118, PTH120


def state_of_packages() -> tuple[tuple[str, ...], ...]:
    """The records of installed packages: others when packages have been installed, upgraded or removed."""
    places = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    found = []
    for place in places:
        with suppress(OSError):
            # Not the folder's time: Python's own caches change that.
            found.append(tuple(sorted(name for name in os.listdir(place) if name.endswith(_RECORDS))))  # noqa: PTH208
    return tuple(found)
