"""Which files Python code reads while it is imported: a module may keep what it found there (matplotlibrc)."""

from __future__ import annotations

import os
import sys

_NO_FILES = ("/proc/", "/sys/", "/dev/")
# Python checks these itself against the files that they are made from.
_COMPILED = ".pyc"


class Opened:
    """Notes the files that are opened for reading in this process, from now until `end`."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._is_on = True
        # It cannot be removed again (PEP 578), and costs nothing to speak of when it is off.
        sys.addaudithook(self._note)

    def end(self) -> frozenset[str]:
        """The files; those in the current folder are relative paths."""
        self._is_on = False
        return frozenset(self._paths)

    def _note(self, event: str, args: tuple[object, ...]) -> None:
        if not self._is_on or event != "open":
            return
        path, _, flags = args
        if not isinstance(path, str | bytes) or not isinstance(flags, int):
            return
        if flags & (os.O_ACCMODE | os.O_CREAT | os.O_DIRECTORY) == os.O_RDONLY:
            text = os.fsdecode(path)
            if not text.startswith(_NO_FILES) and not text.endswith(_COMPILED):
                self._paths.add(text)
