"""Looks at workers that got SIGTERM after a failure: one that can do nothing with it need not have the whole grace."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection

from elaunch.agent import linux
from elaunch.agent.core import survivors
from elaunch.agent.core.events import WorkersStuck
from elaunch.agent.core.survivors import LOOK_EVERY_S, Inside, Outside, Stillness, SurvivorLook
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.reporter import Reporter

_TICKS = os.sysconf("SC_CLK_TCK")
_FILE_BYTES_MAX = 4096
# To read so many takes a hundredth of a second. A worker with more threads has its whole grace.
_THREADS_MAX = 512
# After a longer time between two looks this agent was stopped itself, and has seen nothing of what happened.
_GAP_S_MAX = 0.2


class SurvivorWatch:
    """Looks at the workers of `group`, and posts `WorkersStuck` where some are. Only the agent's loop calls it."""

    def __init__(self, group: WorkerGroup, reporter: Reporter) -> None:
        self._group = group
        self._post = reporter.post
        self._ranks: set[int] = set()
        # Those whose collective was broken off.
        self._freed: set[int] = set()
        self._still: dict[int, Stillness | None] = {}
        self._living: frozenset[int] = frozenset()
        self._posted: frozenset[int] = frozenset()
        self.due_s = time.monotonic()

    def add(self, local_ranks: Collection[int]) -> None:
        """These get SIGTERM now, and have a handler for it."""
        self._ranks.update(local_ranks)

    def tick(self, now_s: float) -> None:
        """Look, if that is due."""
        if now_s < self.due_s:
            return
        states = {rank: linux.state(pid) for rank, pid in self._group.pids.items()}
        living = frozenset(rank for rank, state in states.items() if state not in ("", "Z", "X"))
        if living != self._living or now_s - self.due_s > _GAP_S_MAX:
            # What one of them did ends with it: its peers may come out of their collective now.
            self._living, self._posted = living, frozenset()
            self._still.clear()
        self.due_s = now_s + LOOK_EVERY_S
        # Only if all are stuck does it matter, and looks take time from those that are on their way out.
        is_quiet = "R" not in states.values()
        for rank in self._ranks & living - (frozenset() if is_quiet else self._freed):
            self._look(rank, now_s)
        stuck = frozenset(rank for rank in living if survivors.is_stuck(self._still.get(rank)))
        if is_quiet and stuck and stuck != self._posted:
            self._posted = stuck
            names = dict.fromkeys(survivors.collective(self._inside(rank).main) for rank in sorted(stuck))
            self._post(WorkersStuck(self._group.generation, stuck, ", ".join(names)))

    def _look(self, rank: int, now_s: float) -> None:
        recorder, pid = self._group.recorders.get(rank), self._group.pids[rank]
        answer = recorder.look_at_threads() if recorder else None
        if recorder is None or answer is None:
            # Who does not answer is neither known to be still, nor known to have moved.
            return
        self._still[rank] = state = self._still.get(rank)
        inside, world_size = survivors.read_inside(answer), self._group.table.world_size
        is_candidate = inside is not None and survivors.waits_in_collective(inside, world_size)
        outside = _outside(pid) if is_candidate else None
        if inside is None or outside is None:
            self._still[rank] = None
            return
        self._still[rank] = now = survivors.after(state, SurvivorLook(inside, outside), world_size, now_s)
        if survivors.waits_in_vain(now) and rank not in self._freed:
            # Otherwise it waits until a peer that got the error has ended, and the next one waits for its end.
            self._freed.add(rank)
            recorder.break_off(*inside.at)

    def _inside(self, rank: int) -> Inside:
        state = self._still[rank]
        assert state
        return state.look.inside


def _outside(pid: int) -> Outside | None:
    """What the kernel says of this process; None where it does not say all of it."""
    try:
        tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
        if len(tids) > _THREADS_MAX:
            return None
        ran_ns = {tid: linux.thread_ran_ns(pid, tid) for tid in tids}
        calls = {tid: linux.thread_call(pid, tid) for tid in tids}
        fields = linux.stat_fields(pid)
        with open(f"/proc/{pid}/io", "rb", 0) as file:  # noqa: PTH123
            lines = file.read(_FILE_BYTES_MAX).splitlines()
        written = next(int(line.split()[1]) for line in lines if line.startswith(b"wchar:"))
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    children = {child: linux.name(child) for child in linux.children(pid)}
    is_counted = ran_ns.get(pid, 0) > 0
    is_pending = linux.is_pending(pid, signal.SIGTERM)
    return Outside(pid, calls, children, written, cpu_s, ran_ns if is_counted else {}, is_pending)
