"""What the guardian writes of an agent that was killed, or crashed: a line on its stderr, an event in its timeline.

Like guardian.py, it imports only the standard library.
"""

from __future__ import annotations

import json
import os
import re
import select
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime

# `typing` itself is slow to import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# A stderr that takes nothing gets no last words after this long.
_LAST_WORDS_S = 1.0


def last_words(notes: Mapping[str, Any], stderr: int, kernel_log: int) -> None:
    """Report the end of an agent that did not end in order, on its stderr and in its timeline.

    `notes` are facts that the agent has noted: see `GuardianClient.note`.
    """
    pid, generation, count = notes["pid"], notes.get("generation", -1), notes.get("workers", 0)
    host = notes["host"]
    when = f"in generation {generation}" if generation >= 0 else "before its workers ran"
    ended = f"; its {count} workers there were ended" if count > 1 else "; its worker there was ended" * count
    why = (
        "killed by the kernel, out of memory"
        if _is_oom_victim(pid, kernel_log)
        else "by a signal such as kill -9, or a crash of its own"
    )
    text = f"elaunch itself (pid {pid}) died on {host} {when}, {why}{ended}"
    at = time.time()
    line = f"elaunch: {text}"
    if notes["form"] == "json":
        moment = datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")
        line = json.dumps({"time": moment, "level": "error", "node": host, "generation": generation, "text": text})
    elif notes["form"] == "timed":
        line = time.strftime("%Y-%m-%d %H:%M:%S ") + line
    with suppress(OSError):
        # Nobody may read a pipe that is full.
        if select.select([], [stderr], [], _LAST_WORDS_S)[1]:
            os.write(stderr, f"{line}\n".encode(errors="backslashreplace"))
    event = {"generation": generation, "event": "agent_died", "at": at, "monotonic_s": time.monotonic()}
    with suppress(OSError):
        fd = os.open(notes.get("timeline", ""), os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        # The agent's last line may be cut.
        size = os.fstat(fd).st_size
        is_cut = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        said = json.dumps({**event, "host": host, "pid": pid, "workers": count, "reason": text})
        os.write(fd, f"{chr(10) if is_cut else ''}{said}\n".encode())
        os.close(fd)


def open_kernel_log() -> int:
    """What the kernel logs from now on; -1 if this user may not read it."""
    with suppress(OSError):
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(log, 0, os.SEEK_END)
        return log
    return -1


def _is_oom_victim(pid: int, kernel_log: int) -> bool:
    with suppress(OSError):
        while record := os.read(kernel_log, 8192):
            if re.search(rb"[Kk]illed process %d\b" % pid, record):
                return True
    return False
