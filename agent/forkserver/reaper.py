"""The fork server's children: their names, the signals that they get, and the news of their ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from elaunch.agent.linux import parent, state

_GROUP_LOOK_S = 0.02
_REAP_AFTER_S = 0.02
# One that waits for a disk ends later. The workers, which end with this process, wait no longer for it.
_KILLED_S = 1.0
NO_RANK = -1
# The states of a process that is gone or a zombie.
_ENDED = ("", "Z", "X")

Name = tuple[int, int | str]
News = dict[str, Any]


class Children:
    """The children of this process by pid. Each has a name: its generation, and its local rank or "store".

    Only this process reaps them, so a pid belongs to its child until then. A child makes a process group of its own
    when it starts.

    An exit is reported at once, and the child reaped a little later. Until the child's last thread has left /proc, the
    kernel lets the call that reaps spin, and that thread often waits for the same CPU: 2 ms of each restart, or more.
    """

    def __init__(self) -> None:
        self._names: dict[int, Name] = {}
        # `_asked` are leaders of process groups that were asked to end as a whole. `_held` is the news of leaders that
        # ended before their groups: a shell ends at once, while the program that it started may be saving.
        self._asked: set[int] = set()
        self._held: dict[int, News] = {}
        self._dead: set[int] = set()
        self._reap_s = 0.0

    @property
    def look_s(self) -> float | None:
        """After how many seconds `ended` must be called again although no child ends. None: it need not be."""
        reap_s = max(self._reap_s - time.monotonic(), 0.0) if self._dead else None
        return min((s for s in (reap_s, _GROUP_LOOK_S if self._held else None) if s is not None), default=None)

    @property
    def is_due(self) -> bool:
        """Whether `ended` must be called now although no child has ended."""
        return bool(self._held) or (bool(self._dead) and time.monotonic() >= self._reap_s)

    def a_worker(self) -> int | None:
        """The pid of a worker of the newest generation. None without one."""
        workers = [(generation, pid) for pid, (generation, key) in self._names.items() if isinstance(key, int)]
        return max(workers)[1] if workers else None

    def whose(self, pid: int) -> Name | None:
        """The name of the child which that process is or descends from; None if there is none, or it is gone."""
        while pid and pid not in self._names:
            pid = parent(pid)
        return self._names.get(pid)

    def of_lost(self, pid: int) -> Name | None:
        """A name of the newest generation for a process which may have come from any of its ranks, local rank -1.

        It has ended, or init has adopted it; None for others, and for a sender outside of this pid namespace (0).
        """
        worker = self.a_worker()
        is_ending = parent(pid) <= 1 and (state(pid) in _ENDED or _has_no_memory(pid))
        is_lost = pid > 0 and (is_ending or _has_our_marker(pid))
        return (self._names[worker][0], NO_RANK) if worker and is_lost else None

    def add(self, pid: int, name: Name) -> None:
        self._names[pid] = name

    def ended(self) -> Iterator[News]:
        """The news of exits; of those since the last call, in the order of the children's starts."""
        if time.monotonic() >= self._reap_s:
            self.reap()
        for pid in [*self._names]:
            if (code := _exit_code(pid)) is None:
                continue
            self._dead.add(pid)
            self._reap_s = time.monotonic() + _REAP_AFTER_S
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

    def signal(self, names: Collection[Name], signum: int, group: bool) -> None:
        """Signal the children of these names, or their process groups. After SIGKILL nothing waits for a group."""
        living = [pid for pid, known in self._names.items() if known in names]
        held = [pid for pid, news in self._held.items() if (news["generation"], news["key"]) in names]
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

    def kill(self) -> None:
        """Kill and reap all children that are left."""
        names = {*self._names.values()}
        self.signal(names, signal.SIGKILL, group=False)
        self.finish(names)

    def finish(self, names: Collection[Name]) -> None:
        """Wait a moment for the ends of these children, which were killed, and reap all that have ended."""
        until_s = time.monotonic() + _KILLED_S
        for pid in [pid for pid, name in self._names.items() if name in names]:
            while _exit_code(pid) is None and time.monotonic() < until_s:
                time.sleep(0.001)
            if _exit_code(pid) is not None:
                del self._names[pid]
                self._dead.add(pid)
        self.reap()

    def reap(self) -> None:
        """Reap the children whose exits were reported, and processes that a preloaded module has started."""
        while self._dead:
            os.waitpid(self._dead.pop(), 0)
        with suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in self._names:
                    return
                os.waitpid(found.si_pid, 0)


def _exit_code(pid: int) -> int | None:
    """A child's exit code, negative for a signal; None while it lives. The child is left to be reaped."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _signal_group(leader: int, signum: int) -> bool:
    """Signal a process group. Returns whether it exists. Raises PermissionError if it is all another user's (sudo)."""
    try:
        os.killpg(leader, signum)
    except ProcessLookupError:
        return False
    return True


def _has_our_marker(pid: int) -> bool:
    from elaunch.agent.guardian.guardian import VARIABLE

    marker = os.environb.get(VARIABLE.encode(), b"")
    with suppress(OSError):
        mark = b"%s=%s" % (VARIABLE.encode(), marker)
        return bool(marker) and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


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


def _has_no_memory(pid: int) -> bool:
    """Whether the kernel has taken a process's memory, which it does before the process is a zombie."""
    try:
        with open(f"/proc/{pid}/statm", "rb", 0) as file:  # noqa: PTH123
            return file.read().startswith(b"0 ")
    except OSError:
        return True
