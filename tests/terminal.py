"""A command at a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyte

from tests.harness import COMMAND, DEADLINE_S, environment


class Terminal:
    """elaunch with a controlling terminal of its own. `text` is all that the terminal has been sent."""

    def __init__(
        self, folder: Path, *args: str, columns: int = 0, rows: int = 0, env: Mapping[str, str] | None = None
    ) -> None:
        self._main, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._size = (columns or 80, rows or 24)
        self.text = ""
        self._raw = b""
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            cwd=folder,
            env=environment(env),
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(follower)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self._main)

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._main)

    def type(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def read_until(self, text: str, times: int = 1) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while self.text.count(text) < times:
            assert self._read(end_s), f"every process has left this terminal without {text!r}\n{self.text}"

    def read_all(self) -> int:
        """Read until every process has left the terminal. Returns the command's exit code."""
        end_s = time.monotonic() + DEADLINE_S
        while self._read(end_s):
            pass
        return self.process.wait(DEADLINE_S)

    def shown(self) -> list[str]:
        """The lines on the screen in the end, also those that have scrolled away."""
        columns, rows = self._size
        screen = pyte.HistoryScreen(columns, rows, history=10_000)
        pyte.ByteStream(screen).feed(self._raw)
        gone = ["".join(row[column].data for column in range(columns)) for row in screen.history.top]
        return [line.rstrip() for line in (*gone, *screen.display)]

    def _read(self, end_s: float) -> bool:
        ready, _, _ = select.select([self._main], [], [], max(0.0, end_s - time.monotonic()))
        assert ready, f"nothing came within {DEADLINE_S:g} s\n{self.text}"
        try:
            data = os.read(self._main, 4096)
        except OSError:
            return False
        self._raw += data
        self.text = self._raw.decode(errors="replace")
        return bool(data)
