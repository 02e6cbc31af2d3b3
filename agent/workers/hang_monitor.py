"""Looks at workers that may hang: at their processes in /proc, and at their stacks; and makes the failure of a hang."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from elaunch.agent import linux
from elaunch.agent.core import hang
from elaunch.agent.core.actions import Blame, KeepStacks, LookAtStacks, NameLingering, TakeStacks
from elaunch.agent.core.events import Sampled, StacksTaken, WorkersHung
from elaunch.agent.core.lingering import lingering_words
from elaunch.agent.core.stack_groups import Stack, full_text, group_words, grouped
from elaunch.agent.core.standstill import LOOK_EVERY_S
from elaunch.agent.linux import start_thread
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.workers.group import CurrentGroup, WorkerGroup
from elaunch.agent.workers.reporter import Reporter
from elaunch.agent.workers.vitals import Vitals
from elaunch.rendezvous.texts import node_host
from elaunch.rendezvous.types import Failure, FailureKind

if TYPE_CHECKING:
    from elaunch.agent.workers.flight_recorder import FlightRecorder

# The longest look is a part of the time after which ranks that stand still hang.
_LOOKS_PER_LIMIT = 6
# Workers that stand still may be asked for many entries: it takes a worker 30 µs for each.
_ENTRIES_MAX = 50_000
STACKS_FILE = "stacks.txt"
_STOPPED_ADVICE = (
    "find out who sent it SIGSTOP (a person, a debugger, a scheduler that suspends jobs); kill -CONT PID lets a stopped"
    " rank go on"
)
_ADVICE = "see where each rank is: the log has it above"


class HangMonitor:
    """Samples the current generation's workers, if there is a `hang_after_s`, and takes their stacks when asked.

    `later` runs the writing of files in another thread: the disk may be why the workers hang.
    """

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
        self._later = later
        self.is_on = hang_after_s > 0
        self._is_running = False
        self._vitals = Vitals(min(LOOK_EVERY_S, hang_after_s / _LOOKS_PER_LIMIT))

    @property
    def due_s(self) -> float | None:
        """When the next look is due, on the monotonic clock; it waits for a wake-up that is due earlier."""
        return self._vitals.due_s

    def begin(self) -> None:
        """Look at the current generation's workers from now on."""
        self._vitals.forget()
        self._is_running = self.is_on

    def end(self) -> None:
        """Look at them no more."""
        self._vitals.forget()
        self._is_running = False

    def sample(self, now_s: float) -> Sampled | None:
        """What the workers did since the last look, if another is due."""
        if not self._is_running:
            return None
        group = self._current.group
        if not self._vitals.is_due(now_s):
            return None
        disturbed = frozenset(rank for rank, recorder in group.recorders.items() if recorder.take_disturbed())
        windows = self._vitals.look(group.pids, now_s, disturbed)
        for rank, recorder in group.recorders.items():
            answers, is_outstanding = recorder.take_asked(), recorder.is_stalled(now_s)
            if window := windows.get(rank):
                windows[rank] = replace(window, answers=answers, is_outstanding=is_outstanding)
        return Sampled(group.generation, windows) if windows else None

    def look_at_stacks(self, order: LookAtStacks) -> None:
        """Take stacks in a thread; posts `StacksTaken`."""
        post = self._reporter.post
        self._take(order.local_ranks, lambda found: post(StacksTaken(order.generation, found)))

    def name_lingering(self, order: NameLingering) -> None:
        """Take the stacks of workers whose programs have ended, and say what keeps their processes."""
        group = self._current.group
        threads = {group.rank(local): group.links[local].threads for local in order.local_ranks & group.links.keys()}

        def taken(found: tuple[Stack, ...]) -> None:
            # One may have exited meanwhile.
            there = [stack for stack in found if stack.state not in ("", "Z", "X")]
            for line in lingering_words(there, threads, node_host(socket.gethostname()), order.for_s, order.job):
                self._reporter.warn(line)

        self._take(order.local_ranks, taken)

    def take_stacks(self, order: TakeStacks) -> None:
        """Take the stacks of workers that have gone silent, and write them to the log; posts `WorkersHung`."""
        group, generation = self._current.group, order.generation
        self._reporter.timeline.stamp(generation, "hung", quiet_s=round(order.quiet_s))
        standings = {
            rank: hang.Standing(link.step, link.phase)
            for rank, link in group.links.items()
            if rank in order.local_ranks and link.reports
        }

        def taken(found: tuple[Stack, ...]) -> None:
            for each in grouped(found):
                self._reporter.warn(group_words(each))
            self.keep_stacks(KeepStacks(generation, full_text(found)))
            by_rank = {stack.rank - group.rank(0): stack for stack in found}
            suspect = hang.who_hangs(standings, by_rank, order.quiet_s)
            failure = self._failure(group, suspect.local_rank, suspect.message)
            self._reporter.post(WorkersHung(generation, replace(failure, is_blameless=suspect.is_blameless)))

        self._take(order.local_ranks, taken)

    def keep_stacks(self, order: KeepStacks) -> None:
        """Write stacks to the generation's folder, if the user keeps logs."""
        if self._run_dir.logs:
            self._later(lambda: self._write(order))

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

    def blame(self, order: Blame) -> None:
        """Make a failure of a hang; posts `WorkersHung`."""
        group, generation = self._current.group, order.generation
        self._reporter.timeline.stamp(generation, "hung")
        failure = self._failure(group, order.local_rank, order.message)
        self._reporter.post(WorkersHung(generation, replace(failure, is_blameless=order.is_blameless)))

    def _take(self, local_ranks: frozenset[int], then: Callable[[tuple[Stack, ...]], None]) -> None:
        """Call `then` in a thread, with the stacks of these workers and with what torch's flight recorders say."""
        group = self._current.group
        pids = {group.rank(local): pid for local, pid in group.pids.items() if local in local_ranks}
        recorders = {group.rank(local): each for local, each in group.recorders.items() if local in local_ranks}

        def taken(found: tuple[Stack, ...]) -> None:
            try:
                found = _with_evidence(found, recorders)
                # With a process group they were reached after all.
                unreached = {rank: said for rank, said in group.unreached.items() if rank not in recorders}
                found = tuple(replace(each, entered=unreached.get(each.rank, each.entered)) for each in found)
            finally:
                # The core waits for an answer.
                then(found)

        _take(pids, taken)

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


def _with_evidence(stacks: tuple[Stack, ...], recorders: Mapping[int, FlightRecorder]) -> tuple[Stack, ...]:
    """The stacks with what the recorders, by rank, say of their ranks."""
    if not recorders:
        return stacks
    # Imported here: a healthy job never needs it.
    from elaunch.agent.core.collectives import evidence
    from elaunch.agent.workers.flight_recorder import all_entries

    found = evidence(all_entries(recorders, _ENTRIES_MAX))
    return tuple(
        replace(stack, entered=said.words, waits=said.waits, has_begun=said.has_begun)
        if (said := found.get(stack.rank))
        else stack
        for stack in stacks
    )


def _take(pids: Mapping[int, int], use: Callable[[tuple[Stack, ...]], None]) -> None:
    """Take stacks in a new thread, which calls `use` with them; with none if that is not to be done."""
    if not start_thread(partial(_take_and_use, pids, use), "elaunch-stacks"):
        use(())


def _take_and_use(pids: Mapping[int, int], use: Callable[[tuple[Stack, ...]], None]) -> None:
    # Imported here: a healthy job never needs it.
    from elaunch.agent.workers import stacks

    try:
        found = stacks.take(pids)
    except Exception:
        # The core waits for an answer.
        found = ()
    use(found)
