"""The processes that workers of a successful generation have left behind (an upload, a daemon), while they work."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elaunch.agent import linux
from elaunch.agent.workers.group import Reporter

# A process works if it uses this share of a core, or moves this many bytes a second. An upload that reads its file
# does; a monitor that looks now and then (tensorboard, `nvidia-smi -l`) does not.
_CPU_SHARE = 0.05
_BYTES_PER_S = 10_000
# Uses are compared over this long, so that a short wait for a server is not idleness.
_WINDOW_S = 5.0
# A process that always works would keep the job's nodes for ever: all end after so many times the grace.
_GRACES_MAX = 60


@dataclass(frozen=True)
class Use:
    """What a process has used since its start, its ended children included."""

    cpu_s: float = 0.0
    io_bytes: int = 0


class Idleness:
    """Judges processes by their use, by pid. They begin as working at `now_s`. `due_s` is when to call `is_over`."""

    def __init__(self, grace_s: float, now_s: float, uses: Mapping[int, Use]) -> None:
        self._grace_s = grace_s
        self._window_s = min(_WINDOW_S, grace_s / 2)
        self._uses, self._looked_s, self._worked_s = dict(uses), now_s, now_s
        self._end_s = now_s + grace_s * _GRACES_MAX

    @property
    def due_s(self) -> float:
        return self._looked_s + self._window_s

    def is_over(self, now_s: float, uses: Mapping[int, Use]) -> bool:
        """Whether none has worked for the whole grace, or their time is over."""
        since_s = now_s - self._looked_s
        if any(_works(use, self._uses.get(pid, Use()), since_s) for pid, use in uses.items()):
            self._worked_s = now_s
        self._uses, self._looked_s = dict(uses), now_s
        return now_s >= min(self._worked_s + self._grace_s, self._end_s)


def _works(use: Use, before: Use, since_s: float) -> bool:
    is_moving = use.io_bytes - before.io_bytes >= _BYTES_PER_S * since_s
    return is_moving or use.cpu_s - before.cpu_s >= _CPU_SHARE * since_s


_LOOK_S = 0.1
# A process that ends with its worker may take a moment; it is not worth a line.
_SAY_AFTER_S = 1.0
_SHOWN_MAX = 4
_COMMAND_MAX = 100
# Processes that Python and torch start for a worker, and that are of no use without it.
_HELPERS = (
    b"multiprocessing.spawn",
    b"multiprocessing.forkserver",
    b"torch/_inductor/compile_worker",
    b"torch._inductor",
)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Leftovers:
    """Waits for the processes that `find` lists by pid, as long as one of them works.

    `due_s` is when `tick` is due, None if the wait is over: all have ended, or do nothing.
    """

    def __init__(self, find: Callable[[], list[int]], grace_s: float, now_s: float, reporter: Reporter) -> None:
        self._find = find
        self._grace_s = grace_s
        self._reporter = reporter
        self._say_s: float | None = now_s + _SAY_AFTER_S
        self._pids = find()
        self._idleness = Idleness(grace_s, now_s, _uses(self._pids))
        self.due_s: float | None = now_s + _LOOK_S

    def tick(self, now_s: float) -> None:
        """Look whether they have ended, or do nothing."""
        if self.due_s is None or now_s < self.due_s:
            return
        is_due = now_s >= self._idleness.due_s
        is_said_now = self._say_s is not None and now_s >= self._say_s
        # A host has many processes, and few of them are known: all are listed only now and then. One that was
        # seen before its program had begun may be a helper.
        lives = any(linux.state(pid) not in ("", "Z", "X") and not _is_helper(pid) for pid in self._pids)
        if is_due or is_said_now or not lives:
            self._pids = self._find()
        is_over = not self._pids or (is_due and self._idleness.is_over(now_s, _uses(self._pids)))
        self.due_s = None if is_over else now_s + _LOOK_S
        if is_said_now and self._pids:
            self._say_s = None
            self._reporter.say(
                f"the job has ended well; still running: {named(self._pids)}; waiting until they end, or have done"
                f" nothing for {self._grace_s:g} s (--children-grace); Ctrl-C ends them now"
            )


def of_workers(pids: Iterable[int], fork_servers: Collection[int]) -> list[int]:
    """Those of `pids` that are alive, and that workers have started for more than themselves."""
    # A process that has ended has no parent. The generation's store is a child of the fork server, and about to end.
    return [pid for pid in pids if linux.parent(pid) not in {0, *fork_servers} and not _is_helper(pid)]


def _is_helper(pid: int) -> bool:
    """Whether the process serves its worker alone: one of a pool of compilers, a data loader that was spawned."""
    command = _arguments(pid)
    return any(name in command for name in _HELPERS)


def named(pids: list[int]) -> str:
    """The processes in words: whose they are, and what they run."""
    words = [f"pid {pid} of rank {_rank(pid)} ({_command(pid)})" for pid in pids[:_SHOWN_MAX]]
    return ", ".join([*words, *([f"{len(pids) - _SHOWN_MAX} more"] if len(pids) > _SHOWN_MAX else [])])


def _rank(pid: int) -> str:
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return entry[5:].decode(errors="replace")
    return "?"


def _command(pid: int) -> str:
    # In one line: an argument may be a whole script.
    words = " ".join(_arguments(pid).replace(b"\0", b" ").decode(errors="replace").split())
    return words if len(words) <= _COMMAND_MAX else f"{words[:_COMMAND_MAX]}…"


def _arguments(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _uses(pids: list[int]) -> dict[int, Use]:
    uses: dict[int, Use] = {}
    for pid in pids:
        with suppress(OSError):
            # utime, stime, cutime, cstime
            ticks = sum(map(int, linux.stat_fields(pid)[11:15]))
            uses[pid] = Use(ticks / _TICKS_PER_S, _moved_bytes(pid))
    return uses


def _moved_bytes(pid: int) -> int:
    """What it has read and written, sockets included."""
    # A process of another user does not show it.
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))
    return 0
