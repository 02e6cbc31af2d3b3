"""Finds workers that stay at a debugger's prompt after Ctrl-C: pdb takes the signal, and asks again."""

from __future__ import annotations

import os
import time
from collections.abc import Collection

from elaunch.agent import linux
from elaunch.agent.core.events import WorkersAtPrompt
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.reporter import Reporter

# A program that does not take the signal has gone on to its end by then.
_LOOK_S = 0.3


class PromptWatch:
    """Looks at workers that waited for keys when they were interrupted. Only the agent's loop calls it.

    A worker that asks something only after Ctrl-C ("save? [y/n]") is left alone.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._post = reporter.post
        self._group: WorkerGroup | None = None
        self._waited: frozenset[int] = frozenset()
        self.due_s: float | None = None

    def interrupt(self, group: WorkerGroup, local_ranks: Collection[int]) -> None:
        """These workers are about to be interrupted by a person."""
        if os.isatty(0):
            self._group, self._waited = group, self._waiting(group, local_ranks)
            self.due_s = time.monotonic() + _LOOK_S if self._waited else None

    def tick(self, now_s: float) -> None:
        """Post those that still wait, or wait again."""
        if self.due_s is None or now_s < self.due_s or self._group is None:
            return
        self.due_s = None
        if still := self._waiting(self._group, self._waited):
            self._post(WorkersAtPrompt(self._group.generation, still))

    def _waiting(self, group: WorkerGroup, local_ranks: Collection[int]) -> frozenset[int]:
        pids = {local_rank: group.pids.get(local_rank, 0) for local_rank in local_ranks}
        return frozenset(local_rank for local_rank, pid in pids.items() if pid and linux.waits_for_terminal(pid))
