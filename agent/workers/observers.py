"""Looks at the workers of the current generation from outside, for hangs and for slow ranks.

What does so is imported at the first look: a short job ends before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from elaunch.agent import needed_later
from elaunch.agent.core.events import Sampled
from elaunch.agent.linux import start_thread
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.workers.group import CurrentGroup
from elaunch.agent.workers.reporter import Reporter

if TYPE_CHECKING:
    from elaunch.agent.workers.hang_monitor import HangMonitor
    from elaunch.agent.workers.slow_monitor import SlowMonitor
    from elaunch.agent.workers.unanswered import Unanswered

# After the start of the first workers.
_FIRST_LOOK_S = 1.0
# Less than the shortest time after which the links wake the loop.
_COUNT_EVERY_S = 0.7


class Observers:
    """Arguments as for `HangMonitor`. The agent's loop calls all methods."""

    def __init__(
        self,
        current: CurrentGroup,
        reporter: Reporter,
        run_dir: RunDir,
        hang_after_s: float,
        later: Callable[[Callable[[], object]], None],
    ) -> None:
        self._current = current
        self._reporter = reporter
        self._run_dir = run_dir
        self._hang_after_s = hang_after_s
        self._later = later
        self._first_s: float | None = None
        self._is_complete = False
        self._count_at_s = 0.0
        self._samples: deque[Sampled] = deque()
        self._is_running = self._has_store = False

    @cached_property
    def hangs(self) -> HangMonitor:
        """What looks at workers that may hang."""
        from elaunch.agent.workers.hang_monitor import HangMonitor

        return HangMonitor(self._current, self._reporter, self._run_dir, self._hang_after_s, self._later)

    @cached_property
    def _slow(self) -> SlowMonitor:
        from elaunch.agent.workers.slow_monitor import SlowMonitor

        return SlowMonitor(self._reporter)

    @cached_property
    def _unanswered(self) -> Unanswered:
        from elaunch.agent.workers.unanswered import Unanswered

        return Unanswered(self._reporter)

    @property
    def due_s(self) -> float | None:
        """When the next look is due, on the monotonic clock; it waits for a wake-up that is due earlier."""
        return self.hangs.due_s if self._is_complete else self._first_s

    def begin(self, *, has_store: bool = False) -> None:
        """Look at the current generation's workers from now on. `has_store`: see `Unanswered.tick`."""
        self._is_running, self._has_store = True, has_store
        if self._is_complete:
            self.hangs.begin()
        else:
            self._first_s = time.monotonic() + _FIRST_LOOK_S

    def end(self) -> None:
        """Look at them no more."""
        self._first_s, self._is_running = None, False
        if self._is_complete:
            self.hangs.end()

    def tick(self, now_s: float) -> None:
        """Look, if that is due."""
        if self._first_s is not None and now_s >= self._first_s:
            self._first_s, self._is_complete = None, True
            start_thread(needed_later.import_all, "elaunch-imports")
            self.hangs.begin()
        if self._is_complete and (sample := self.hangs.sample(now_s)):
            self._samples.append(sample)
            self._slow.sampled(self._current.group, sample.windows)
        # After the sample: what the answers do to a worker is in its next window.
        if self._is_complete:
            self._count_collectives(now_s)
        if self._is_complete and self._is_running and (group := self._current.latest):
            self._unanswered.tick(group, now_s, has_store=self._has_store)

    def _count_collectives(self, now_s: float) -> None:
        """Once a second, ask the workers how many collectives they have entered. They are not waited for."""
        group = self._current.latest
        if group is None or now_s < self._count_at_s or not self.hangs.is_on:
            return
        self._count_at_s = now_s + _COUNT_EVERY_S
        counts = {rank: recorder.look(now_s) for rank, recorder in group.recorders.items()}
        # One that has not answered yet may be anywhere: that look says nothing.
        known = {rank: each for rank, each in counts.items() if each is not None}
        if known and len(known) == len(counts):
            self._slow.counted(group, known)

    def wait_shares(self, generation: int) -> Mapping[int, float]:
        """For which share of the last minutes each worker of that generation waited in collectives, by local rank."""
        return self._slow.wait_shares(generation) if self._is_complete else {}

    def take_samples(self) -> Iterator[Sampled]:
        """What was seen since the last call."""
        while self._samples:
            yield self._samples.popleft()
