"""Formats elaunch's console output: its own lines, the report, and in JSON the workers' lines too."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial

from elaunch.agent.config import LogFormat
from elaunch.rendezvous.format import node_host, plain


class OwnLines:
    """Formats lines. `generation` is the newest that this node has seen; the agent's loop sets it.

    A terminal shows lines as they come, so they need no timestamp there.
    """

    def __init__(self, form: LogFormat, *, has_terminal: bool) -> None:
        self._form = form
        self._has_time = form is LogFormat.TEXT and not has_terminal
        self._host = node_host(socket.gethostname())
        self.generation: int | None = None

    @property
    def is_json(self) -> bool:
        return self._form is LogFormat.JSON

    def line(self, text: str, level: str = "info") -> bytes:
        """Elaunch's own line or lines, escaped: they quote other nodes and programs."""
        if self.is_json:
            return self._object(level, text=text)
        head = f"{self._time()}elaunch: "
        return "".join(f"{head}{line}\n" for line in plain(text, keep="\n\t").split("\n")).encode()

    def report(self, text: str, record: Mapping[str, object]) -> bytes:
        """The report: `text`, with the time before elaunch's own lines in it; or `record` as an object."""
        if self.is_json:
            level = "info" if record["exit_code"] == 0 else "error"
            return self._object(level, text=text, report=record)
        text = plain(text, keep="\n\t")
        return re.sub(r"^elaunch: ", f"{self._time()}elaunch: ", text, flags=re.M).encode()

    def frame(self, generation: int, rank: int, stream: str) -> Callable[[bytes], bytes] | None:
        """The formatter of a worker's lines as JSON; None if they stay as they are."""
        return partial(self._objects, generation, rank, stream) if self.is_json else None

    def _objects(self, generation: int, rank: int, stream: str, lines: bytes) -> bytes:
        head = {"time": iso(time.time()), "node": self._host, "generation": generation, "rank": rank, "stream": stream}
        # Split at `\r` too: a progress bar is a line each time it moves.
        texts = (line.decode(errors="replace") for line in lines.splitlines())
        return b"".join(json.dumps({**head, "text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)

    def _time(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S ") if self._has_time else ""

    def _object(self, level: str, **fields: object) -> bytes:
        known = {} if self.generation is None else {"generation": self.generation}
        line = {"time": iso(time.time()), "level": level, "node": self._host, **known, **fields}
        return json.dumps(line).encode() + b"\n"


def iso(at_s: float) -> str:
    """ISO 8601, in local time with its offset, to the millisecond."""
    return datetime.fromtimestamp(at_s).astimezone().isoformat(timespec="milliseconds")


def can_move_cursor(fd: int) -> bool:
    """Whether it is a terminal, and not a dumb one."""
    return os.isatty(fd) and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def is_one_terminal(one: int, other: int) -> bool:
    """Whether both descriptors are the same terminal."""
    return os.isatty(one) and os.isatty(other) and os.path.samestat(os.fstat(one), os.fstat(other))
