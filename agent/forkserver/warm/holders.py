"""Finds the warm fork servers that have a socket, where the socket itself cannot tell who that is."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from elaunch.agent.forkserver.warm.handover import MARKER_ROOM
from elaunch.agent.forkserver.wire import PROCESS_NAME
from elaunch.agent.guardian.guardian import VARIABLE
from elaunch.agent.linux import name


def holders(path: Path) -> list[int]:
    """The pids of the warm fork servers that have a socket at `path` open (proc_net(5), proc_pid_fd(5))."""
    with suppress(OSError):
        lines = (line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text(errors="replace").splitlines())
        sockets = {f"socket:[{words[6]}]" for words in lines if len(words) == 8 and words[7] == os.fspath(path)}
        pids = (int(each) for each in os.listdir("/proc") if each.isdigit())  # noqa: PTH208
        return sorted(pid for pid in pids if _is_one(pid) and sockets & _open(pid))
    return []


def _is_one(pid: int) -> bool:
    """Whether it is a warm fork server, or is going to be one: then only its environment tells (see MARKER_ROOM)."""
    with suppress(OSError):
        marker = f"{VARIABLE}={'-' * MARKER_ROOM}".encode()
        return name(pid) == PROCESS_NAME or marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _open(pid: int) -> set[str]:
    found: set[str] = set()
    # The process may end meanwhile, or be another user's.
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))  # noqa: PTH115
    return found
