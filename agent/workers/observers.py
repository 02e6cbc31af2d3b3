"""Looks at the current generation's workers from outside: do they hang, is one slow, can they reach rank 0?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from elaunch.agent import linux
from elaunch.agent.core.actions import Blame, KeepStacks, LookAtStacks, NameThreads
from elaunch.agent.core.events import Sampled, StacksTaken, WorkersHung
from elaunch.agent.diagnosis import stacks
from elaunch.agent.diagnosis.collectives import LOOKS, WaitShares, last_entered, slow_rank, slow_text
from elaunch.agent.diagnosis.hang import LOOK_EVERY_S
from elaunch.agent.diagnosis.proc_stats import Vitals
from elaunch.agent.diagnosis.reach import unreachable_text, why_not
from elaunch.agent.diagnosis.stack_groups import Stack, what_keeps
from elaunch.agent.linux import start_thread
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.workers.group import CurrentGroup, Reporter, WorkerGroup
from elaunch.agent.workers.link import Link
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Failure, FailureKind

# A short job ends before.
_FIRST_LOOK_S = 1.0
# Less than the shortest time after which the links wake the loop.
_COUNT_EVERY_S = 0.7
# The longest look is a part of the time after which idle ranks hang.
_LOOKS_PER_LIMIT = 6
# The node of rank 0 may start its workers later than this one, or just be losing them: a second try decides.
_MASTER_AFTER_S = 5.0
STACKS_FILE = "stacks.txt"
_STOPPED_ADVICE = (
    "find out who sent it SIGSTOP (a person, a debugger, a scheduler that suspends jobs); kill -CONT PID lets a stopped"
    " rank go on"
)
_PHASE_MAX = 100
_ADVICE = "see where each rank is: the log has it above"


class Observers:
    """Samples workers if hangs are looked for, and takes their stacks when asked. Only the agent's loop calls it.

    `later` runs the writing of files in another thread: the disk may be why the workers hang.
    """

    def __init__(
        self,
        current: CurrentGroup,
        reporter: Reporter,
        run_dir: RunDir,
        times: Times,
        later: Callable[[Callable[[], object]], None],
    ) -> None:
        self._current = current
        self._reporter = reporter
        self._run_dir = run_dir
        self._later = later
        self._is_on = times.hang_after_s > 0
        # A healthy step may take longer than the default: reports count only where the user gave a limit.
        self._counts_reports = times.hang_timeout_s > 0
        self._reports: Mapping[int, int] = {}
        self._vitals = Vitals(min(LOOK_EVERY_S, times.hang_after_s / _LOOKS_PER_LIMIT))
        self._from_s: float | None = None
        self._master_at_s: float | None = None
        self._count_at_s = 0.0
        self._waits = WaitShares()
        # For which share of the last minutes each worker waited in collectives, by local rank.
        self.wait_shares: Mapping[int, float] = {}
        # The rank that was slow in the last window, and those that were named: each once in an agent's life.
        self._suspect = -1
        self._named: set[int] = set()

    @property
    def due_s(self) -> float | None:
        """When the next look is due, on the monotonic clock; it waits for a wake-up that is due earlier."""
        return None if self._from_s is None else max(self._from_s, self._vitals.due_s or 0.0)

    def begin(self, *, has_store: bool = False) -> None:
        """Look at the current generation's workers from now on.

        `has_store` says that a process of its own serves MASTER_PORT, which listens from the start.
        """
        group, now_s = self._current.latest, time.monotonic()
        self._from_s = now_s + _FIRST_LOOK_S if self._is_on else None
        self._waits, self.wait_shares, self._suspect = WaitShares(), {}, -1
        is_other = group is not None and group.group_rank > 0 and has_store
        self._master_at_s = now_s + _MASTER_AFTER_S if is_other else None

    def end(self) -> None:
        """Look at them no more."""
        self._from_s = self._master_at_s = None
        self._vitals.forget()

    def tick(self, now_s: float) -> None:
        """Look, if that is due."""
        if self._from_s is not None and now_s >= self._from_s:
            self._sample(now_s)
            self._count_collectives(now_s)
        if self._master_at_s is not None and now_s >= self._master_at_s:
            self._master_at_s, group = None, self._current.group
            if len(group.recorders) < group.slots:
                start_thread(partial(self._try_master, group), "elaunch-reach")

    def look_at_stacks(self, order: LookAtStacks) -> None:
        """Take stacks in a thread; posts `StacksTaken`."""
        post = self._reporter.post
        self._take(order.local_ranks, lambda found: post(StacksTaken(order.generation, found)))

    def name_threads(self, order: NameThreads) -> None:
        """Log the threads of these workers, from another thread."""

        def log(found: tuple[Stack, ...]) -> None:
            for text in what_keeps(found):
                self._reporter.warn(text)

        self._take(order.local_ranks, log)

    def keep_stacks(self, order: KeepStacks) -> None:
        """Write stacks to the generation's folder, if the user keeps logs."""
        if self._run_dir.logs:
            self._later(lambda: self._write(order))

    def blame(self, order: Blame) -> None:
        """Make a failure of a hang; posts `WorkersHung`."""
        group, generation = self._current.group, order.generation
        self._reporter.timeline.stamp(generation, "hung", quiet_s=order.idle_s)
        failure = self._failure(group, order.local_rank, order.message)
        self._reporter.post(WorkersHung(generation, replace(failure, is_blameless=order.is_blameless)))

    def _sample(self, now_s: float) -> None:
        """Note what the workers did since the last look, if another is due."""
        group = self._current.group
        if not self._vitals.is_due(now_s):
            return
        windows = self._vitals.look(group.pids, now_s)
        for rank, recorder in group.recorders.items():
            is_outstanding = recorder.is_stalled(now_s)
            if window := windows.get(rank):
                windows[rank] = replace(window, is_outstanding=is_outstanding)
        reports = {rank: link.reports for rank, link in group.links.items()}
        if self._counts_reports and any(reports.values()):
            is_silent = reports == self._reports
            windows = {
                rank: replace(window, is_silent=is_silent, reported=_last_report(group.links[rank]))
                for rank, window in windows.items()
            }
        self._reports = reports
        if windows:
            self._reporter.post(Sampled(group.generation, windows))

    def _count_collectives(self, now_s: float) -> None:
        """Once a second, ask the workers how many collectives they have entered. They are not waited for."""
        if now_s < self._count_at_s:
            return
        self._count_at_s, group = now_s + _COUNT_EVERY_S, self._current.group
        counts = {rank: recorder.look(now_s) for rank, recorder in group.recorders.items()}
        # One that has not answered yet may be anywhere: that look says nothing.
        known = {rank: each for rank, each in counts.items() if each is not None}
        if not known or len(known) < len(counts):
            return
        self._waits, shares = self._waits.after(known)
        if shares is None:
            return
        self.wait_shares, before = shares, self._suspect
        self._suspect = slow_rank(shares)
        rank = group.rank(self._suspect)
        if self._suspect >= 0 and self._suspect == before and rank not in self._named:
            self._named.add(rank)
            text, wait = slow_text(rank, self._suspect, shares)
            fields = {"rank": rank, "wait_percent": round(100 * wait), "lasted_s": 2 * LOOKS, "text": text}
            self._reporter.timeline.stamp(group.generation, "slow", **fields)
            self._reporter.warn(text)

    def _try_master(self, group: WorkerGroup) -> None:
        master = Endpoint(group.table.master_addr, group.table.master_port)
        for pause_s in (_MASTER_AFTER_S, 0.0):
            if not (why := why_not(master)):
                return
            time.sleep(pause_s)
        if group is self._current.latest:
            self._reporter.warn(unreachable_text(master, why))

    def _write(self, order: KeepStacks) -> None:
        folder = self._run_dir.generation(order.generation)
        if folder is None:
            return
        path = folder / STACKS_FILE
        try:
            # Another hang of this generation comes behind.
            private = partial(os.open, mode=0o600)
            with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=private) as file:
                file.write(order.text)
        except OSError as error:
            self._run_dir.warn(f"{path} cannot be written ({error.strerror})")
            return
        self._reporter.warn(f"all stacks are in {path}")

    def _take(self, local_ranks: frozenset[int], then: Callable[[tuple[Stack, ...]], None]) -> None:
        """Call `then` in a thread, with the stacks of these workers and with what torch's flight recorders say.

        The core waits for an answer: it gets an empty one if no stack can be taken.
        """
        group = self._current.group
        pids = {group.rank(local): pid for local, pid in group.pids.items() if local in local_ranks}
        recorders = {group.rank(local): each for local, each in group.recorders.items() if local in local_ranks}

        def take() -> None:
            found: tuple[Stack, ...] = ()
            try:
                found = stacks.take(pids)
                now_s = time.monotonic()
                entered = {rank: last_entered(recorder.fresh_counts(now_s)) for rank, recorder in recorders.items()}
                said = [entered.get(each.rank, ("", False)) for each in found]
                found = tuple(
                    replace(each, entered=words, waits=waits) for each, (words, waits) in zip(found, said, strict=True)
                )
            finally:
                then(found)

        if not start_thread(take, "elaunch-stacks"):
            then(())

    def _failure(self, group: WorkerGroup, local_rank: int, message: str) -> Failure:
        failure = self._reporter.node_failure(FailureKind.HANG, group.generation, message)
        is_stopped = linux.state(group.pids.get(local_rank, -1)) == "T"
        folder = self._run_dir.logs and self._run_dir.logs / f"attempt_{group.generation}"
        advice = f"{_ADVICE}, and {folder / STACKS_FILE} has all threads" if folder else _ADVICE
        failure = replace(failure, progressed=True, advice=_STOPPED_ADVICE if is_stopped else advice)
        if local_rank < 0:
            return failure
        link = group.links.get(local_rank)
        return replace(
            failure,
            step=link.step if link else -1,
            lived_s=group.lived_s(local_rank),
            rank=group.rank(local_rank),
            local_rank=local_rank,
            pid=group.pids.get(local_rank, -1),
            log_path=group.log_files.get(local_rank, ""),
        )


def _last_report(link: Link) -> str:
    last = [f"step {link.step}"] if link.step >= 0 else []
    last += [f"its phase {link.phase[:_PHASE_MAX]!r}"] if link.phase else []
    return f"without a report since {', in '.join(last)}" if last else "without a report"
