"""Decides what is done for the next generation while this one runs: who forks its workers ahead, when and where."""

from __future__ import annotations

from contextlib import suppress

from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.guardian.client import GuardianClient
from elaunch.agent.workers.group import WorkerGroup

# A fork server moves to another cgroup within this time, on most hosts.
_MOVE_S = 0.05
# The program's own start has the CPUs first.
_AFTER_S = 1.0
# Two workers are forked within 20 ms, and processes that wait would be half of the launcher's memory.
_WORKERS_MIN = 3


class ForksAhead:
    """Orders processes that wait for the next generation of `server`'s workers. The agent's loop calls all methods.

    Once all workers of a generation are forked, `server` moves to the next one's cgroup, and `guardian` may use the
    CPUs. Without `is_wanted` there is no next generation to wait for, and the order is that none is to wait.
    """

    def __init__(self, server: ForkServer, guardian: GuardianClient, *, is_wanted: bool) -> None:
        self._server = server
        self._guardian = guardian
        self._is_wanted = is_wanted
        self._group: WorkerGroup | None = None
        self._due_s: float | None = None
        self._is_told = False

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock."""
        return self._due_s

    def begin(self, group: WorkerGroup, now_s: float) -> None:
        """A generation begins. Its workers take the processes that wait."""
        self._group, self._is_told = group, False
        self._due_s = now_s + _AFTER_S

    def tick(self, now_s: float) -> None:
        """Order processes, some time after all workers of the generation were forked."""
        group = self._group
        is_forked = group is not None and len(group.pids) >= group.slots
        if group and is_forked and not self._is_told:
            self._is_told = True
            self._guardian.note(generation=group.generation, workers=len(group.pids))
            self._move(group)
        if group is None or self._server.preload is None:
            self._due_s = None
            return
        if self._due_s is not None and now_s >= self._due_s:
            # Else the fork server still imports.
            self._due_s = None if is_forked else now_s + _AFTER_S
            if is_forked:
                self._order(group, now_s)

    def _order(self, group: WorkerGroup, now_s: float) -> None:
        if self._guardian.cgroup.is_moving:
            self._due_s = now_s + _MOVE_S
            return
        count = self._count(group)
        # A fork server that is gone is replaced, and the workers are forked when they are needed.
        with suppress(OSError):
            self._server.fork_ahead(count)

    def _move(self, group: WorkerGroup) -> None:
        self._guardian.cgroup.move((self._server.pid,), group.generation + 1)

    def _count(self, group: WorkerGroup) -> int:
        """One for each worker, and one for the worker store, which is likely to stay on this node."""
        if not self._is_wanted or group.slots < _WORKERS_MIN:
            return 0
        return group.slots + (group.store is not None)
