"""Orphans: processes that workers of a successful generation have left behind (an upload, a daemon)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import psutil

from elaunch.agent.workers.group import Reporter

# They work if they use this share of a core, or move this many bytes a second. An upload that reads its file does; a
# monitor that polls now and then (tensorboard, `nvidia-smi -l`) does not.
_CPU_SHARE = 0.05
_BYTES_PER_S = 10_000
# Usage is compared over this long, so that a short wait for a server is not idleness.
_WINDOW_S = 5.0
# Processes that always work would keep the job's nodes for ever: all are killed after this many graces.
_GRACES_MAX = 60
# Many end with their workers within the first second, and are not worth a line.
_SOON_S, _POLL_SOON_S, _POLL_S = 1.0, 0.1, 1.0
_SHOWN_MAX = 4
_COMMAND_MAX = 100


class Orphans:
    """Waits for the processes that `find` lists by pid, until they have done nothing for `grace_s`.

    `due_s` is when `may_run` is due again; None before the first call, and when the wait is over.
    """

    def __init__(self, find: Callable[[], list[int]], grace_s: float, reporter: Reporter) -> None:
        self._find = find
        self._grace_s = grace_s
        self._reporter = reporter
        self._begun_s: float | None = None
        self._has_logged = False
        self.due_s: float | None = None

    def may_run(self, now_s: float) -> bool:
        """If due, check whether they have exited or are idle. Returns whether they may still run."""
        if self._begun_s is None:
            self._begun_s = self._compared_s = self._worked_s = now_s
            self._cpu_s, self._moved_bytes = _use(self._find())
            self.due_s = now_s + _POLL_SOON_S
        if self.due_s is None or now_s < self.due_s:
            return self.due_s is not None
        pids = self._find()
        if not pids or self._is_over(pids, now_s, self._begun_s):
            self.due_s = None
            return False
        is_soon = now_s < self._begun_s + _SOON_S
        self.due_s = now_s + (_POLL_SOON_S if is_soon else min(_POLL_S, self._grace_s / 2))
        if not is_soon and not self._has_logged:
            self._has_logged = True
            self._reporter.log(
                f"the job has succeeded; still running: {named(pids)}; waiting until they end, or have done"
                f" nothing for {self._grace_s:g} s (--children-grace); Ctrl-C ends them now"
            )
        return True

    def _is_over(self, pids: list[int], now_s: float, begun_s: float) -> bool:
        since_s = now_s - self._compared_s
        if since_s >= min(_WINDOW_S, self._grace_s / 2):
            cpu_s, moved_bytes = _use(pids)
            is_moving = moved_bytes - self._moved_bytes >= _BYTES_PER_S * since_s
            if is_moving or cpu_s - self._cpu_s >= _CPU_SHARE * since_s:
                self._worked_s = now_s
            self._cpu_s, self._moved_bytes, self._compared_s = cpu_s, moved_bytes, now_s
        return now_s >= min(self._worked_s + self._grace_s, begun_s + self._grace_s * _GRACES_MAX)


def named(pids: list[int]) -> str:
    """The processes as text: pid, rank and command."""
    more = [f"{len(pids) - _SHOWN_MAX} more"] if len(pids) > _SHOWN_MAX else []
    return ", ".join([*map(_named, pids[:_SHOWN_MAX]), *more])


def _named(pid: int) -> str:
    rank, command = "?", ""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        # In one line: an argument may be a whole script.
        command = " ".join(" ".join(process.cmdline()).split())
        rank = process.environ().get("RANK", rank)
    return f"pid {pid} of rank {rank} ({command if len(command) <= _COMMAND_MAX else f'{command[:_COMMAND_MAX]}…'})"


def _use(pids: list[int]) -> tuple[float, int]:
    """The CPU seconds that they and their ended children have used, and the bytes that they read and wrote."""
    cpu_s, moved_bytes = 0.0, 0
    for pid in pids:
        # A process of another user does not show its bytes.
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            cpu_s += sum(process.cpu_times()[:4])
            io = process.io_counters()
            moved_bytes += io.read_chars + io.write_chars
    return cpu_s, moved_bytes
