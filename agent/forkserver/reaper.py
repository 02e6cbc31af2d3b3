"""The fork server's children: their names, the signals that they get, and the news of their ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_GROUP_LOOK_S = 0.02

Name = tuple[int, int | str]
News = dict[str, Any]


class Children:
    """The children of this process by pid. Each has a name: its generation, and its local rank or "store".

    Only this process reaps them, so a pid belongs to its child until `ended` has reported its exit. A child makes a
    process group of its own when it starts.
    """

    def __init__(self) -> None:
        self._names: dict[int, Name] = {}
        # `_asked` are leaders of process groups that were asked to end as a whole. `_held` is the news of leaders that
        # ended before their groups: a shell ends at once, while the program that it started may be saving.
        self._asked: set[int] = set()
        self._held: dict[int, News] = {}

    @property
    def look_s(self) -> float | None:
        """After how many seconds `ended` must be called again although no child ends. None: it need not be."""
        return _GROUP_LOOK_S if self._held else None

    def a_worker(self) -> int | None:
        """The pid of a worker of the newest generation. None without one."""
        workers = [(generation, pid) for pid, (generation, key) in self._names.items() if isinstance(key, int)]
        return max(workers)[1] if workers else None

    def add(self, pid: int, name: Name) -> None:
        self._names[pid] = name

    def ended(self) -> Iterator[News]:
        """The news of exits, in the kernel's order."""
        for pid, code in self._reap():
            if pid not in self._names:
                # A preloaded module started this process.
                continue
            generation, key = self._names.pop(pid)
            news = {"event": "exited", "generation": generation, "key": key, "pid": pid, "code": code}
            if pid in self._asked:
                self._held[pid] = news
            else:
                yield news
        if self._held:
            for pid in self._held.keys() - (_living_groups() & self._asked):
                self._asked.discard(pid)
                yield self._held.pop(pid)

    def signal(self, name: Name, signum: int, group: bool) -> None:
        """Signal the child of that name, or its whole process group. After SIGKILL nothing waits for the group."""
        living = [pid for pid, known in self._names.items() if known == name]
        held = [pid for pid, news in self._held.items() if (news["generation"], news["key"]) == name]
        if signum == signal.SIGKILL:
            self._asked.difference_update(living, held)
        elif group:
            self._asked.update(living)
        for pid in living:
            # A child that has not come to its setsid has no group yet.
            with suppress(PermissionError):
                if not group or not _signal_group(pid, signum):
                    os.kill(pid, signum)
        for pid in held:
            # The pid remains the group's number as long as the group has members.
            with suppress(PermissionError):
                _signal_group(pid, signum)

    def _reap(self) -> Iterator[tuple[int, int]]:
        while self._names:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def _signal_group(leader: int, signum: int) -> bool:
    """Signal a process group. Returns whether it exists. Raises PermissionError if it is all another user's (sudo)."""
    try:
        os.killpg(leader, signum)
    except ProcessLookupError:
        return False
    return True


def _living_groups() -> set[int]:
    """The process groups that have a member which is no zombie."""
    groups: set[int] = set()
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            with suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    groups.add(int(fields[2]))
    return groups
