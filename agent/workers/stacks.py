"""Logs the stacks of hanging workers that do not listen on their link, with py-spy if it is installed."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

_TOOL = "py-spy"
_LOOK_S = 10.0


def look_into(pids: Mapping[int, int], say: Callable[[str], None], done: Callable[[], None]) -> None:
    """Write the stacks of these processes to the log, then call `done`, both in a new thread. `pids` is by rank."""
    threading.Thread(target=_look, args=(pids, say, done), name="elaunch-stacks", daemon=True).start()


def _look(pids: Mapping[int, int], say: Callable[[str], None], done: Callable[[], None]) -> None:
    try:
        tool = shutil.which(_TOOL)
        if pids and not tool:
            ranks = ", ".join(str(rank) for rank in sorted(pids))
            say(
                f"what rank {ranks} is doing cannot be shown: install {_TOOL}, or have the program listen to its agent"
                " (elaunch.trainer.link.listen)"
            )
        elif tool:
            looks = {rank: _start(tool, pid) for rank, pid in pids.items()}
            for rank, look in looks.items():
                say(f"what rank {rank} is doing, by {_TOOL}:\n{_finish(look)}")
    finally:
        done()


def _start(tool: str, pid: int) -> subprocess.Popen[str] | None:
    command = [tool, "dump", "--pid", str(pid)]
    with suppress(OSError):
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    return None


def _finish(look: subprocess.Popen[str] | None) -> str:
    if look is None:
        return f"{_TOOL} cannot be started"
    try:
        return look.communicate(timeout=_LOOK_S)[0].rstrip()
    except subprocess.TimeoutExpired:
        look.kill()
        look.communicate()
        return f"it did not come to an end within {_LOOK_S:g} s"
