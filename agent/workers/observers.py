"""Observes workers from outside: do they hang, is one slow, can they reach rank 0, and do their orphans still work?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import psutil

from elaunch.agent import linux
from elaunch.agent.core.actions import Blame, KeepStacks, NameThreads, Observing, TakeStacks
from elaunch.agent.core.events import GroupFailed, Sampled, StacksTaken
from elaunch.agent.diagnosis import stacks
from elaunch.agent.diagnosis.collectives import WINDOW_SAMPLES, WaitShares, last_entered, slow_rank, slow_text
from elaunch.agent.diagnosis.hang import SAMPLE_EVERY_S
from elaunch.agent.diagnosis.investigate import connect_error, unreachable_text
from elaunch.agent.diagnosis.samplers import ProcSampler
from elaunch.agent.diagnosis.stack_groups import Stack, what_keeps
from elaunch.agent.linux import start_thread
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.output.streams import LogFile
from elaunch.agent.workers.group import Reporter, WorkerGroup
from elaunch.agent.workers.link import Link
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import FailureKind

# Short jobs get no sample.
_FIRST_SAMPLE_S = 1.0
# Less than the shortest time after which the links wake the loop.
_COUNT_EVERY_S = 0.7
# The minimum number of samples before idle ranks count as hung.
_SAMPLES_PER_LIMIT = 6
# The node of rank 0 may start its workers later than this one, or have just lost them: a second try decides.
_MASTER_AFTER_S = 5.0
STACKS_FILE = "stacks.txt"
_STOPPED_ADVICE = (
    "find out who sent it SIGSTOP (a person, a debugger, a scheduler that suspends jobs); kill -CONT PID lets a stopped"
    " rank continue"
)
_PHASE_MAX = 100
_ADVICE = "see where each rank is: the log has it above"

# Orphans work if they use this share of a core, or move this many bytes a second. An upload that reads its file does; a
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


class Observers:
    """Samples one generation's workers if hangs are to be detected, and takes their stacks on request.

    Only the agent's loop calls it. `later` runs file writes in another thread: the disk may be why the workers hang.
    With `has_store` a separate process serves MASTER_PORT, and listens from the start.
    """

    def __init__(
        self,
        group: WorkerGroup,
        reporter: Reporter,
        run_dir: RunDir,
        times: Times,
        later: Callable[[Callable[[], object]], None],
        *,
        has_store: bool = False,
    ) -> None:
        self._group = group
        self._reporter = reporter
        self._run_dir = run_dir
        self._later = later
        # A healthy step may take longer than the default: reports count only where the user gave a limit.
        self._counts_reports = times.hang_timeout_s > 0
        self._reports: Mapping[int, int] = {}
        self._sampler = ProcSampler(min(SAMPLE_EVERY_S, times.hang_after_s / _SAMPLES_PER_LIMIT))
        now_s = time.monotonic()
        self._from_s = now_s + _FIRST_SAMPLE_S if times.hang_after_s > 0 and group.workers else None
        self._master_at_s = now_s + _MASTER_AFTER_S if group.group_rank > 0 and has_store else None
        self._is_over = False
        self._count_at_s = 0.0
        self._waits = WaitShares()
        # The share of the last minutes that each worker waited in collectives, by local rank.
        self.wait_shares: Mapping[int, float] = {}
        # The local rank that was slow in the last window.
        self._suspect = -1

    @property
    def due_s(self) -> float | None:
        """When the next sample is due, on the monotonic clock; it waits for a wake-up that is due earlier."""
        return None if self._from_s is None else max(self._from_s, self._sampler.due_s)

    def end(self) -> None:
        """Stop sampling."""
        self._from_s = self._master_at_s = None
        self._is_over = True

    def tick(self, now_s: float) -> None:
        if self._from_s is not None and now_s >= self._from_s:
            self._sample(now_s)
            self._count_collectives(now_s)
        if self._master_at_s is not None and now_s >= self._master_at_s:
            self._master_at_s = None
            if len(self._group.recorders) < self._group.slots:
                start_thread(self._try_master, "elaunch-reach")

    def act(self, order: Observing) -> None:
        """Carry out an action about stacks or a hang."""
        match order:
            case TakeStacks(generation, local_ranks):
                self._take(local_ranks, lambda found: self._reporter.post(StacksTaken(generation, found)))
            case NameThreads(local_ranks):
                self._take(local_ranks, self._name_threads)
            case KeepStacks():
                # Only if the user keeps logs.
                if self._run_dir.logs:
                    self._later(lambda: self._write(order))
            case Blame():
                self._blame(order)

    def _name_threads(self, found: tuple[Stack, ...]) -> None:
        for text in what_keeps(found):
            self._reporter.warn(text)

    def _blame(self, order: Blame) -> None:
        """Report a hang as a failure; posts `GroupFailed`."""
        generation, local_rank = order.generation, order.local_rank
        self._reporter.timeline.stamp(generation, "hung", quiet_s=order.idle_s)
        worker = self._group.workers[local_rank] if local_rank >= 0 else None
        folder = self._run_dir.logs and self._run_dir.logs / f"attempt_{generation}"
        advice = f"{_ADVICE}, and {folder / STACKS_FILE} has all threads" if folder else _ADVICE
        failure = self._reporter.node_failure(FailureKind.HANG, generation, order.message)
        failure = replace(failure, progressed=True, advice=advice, is_blameless=order.is_blameless)
        if worker:
            failure = replace(
                failure,
                advice=_STOPPED_ADVICE if linux.state(worker.pid) == "T" else advice,
                step=worker.link.step,
                lived_s=worker.lived_s,
                rank=worker.rank,
                local_rank=local_rank,
                pid=worker.pid,
                log_path=worker.log_path,
            )
        self._reporter.post(GroupFailed(generation, failure))

    def _sample(self, now_s: float) -> None:
        """Sample the workers' activity since the last sample, if due."""
        group = self._group
        if now_s < self._sampler.due_s:
            return
        windows = self._sampler.sample(group.pids, now_s)
        for rank, recorder in group.recorders.items():
            is_outstanding = recorder.is_stalled(now_s)
            if window := windows.get(rank):
                windows[rank] = replace(window, is_outstanding=is_outstanding)
        reports = {worker.local_rank: worker.link.reports for worker in group.workers}
        if self._counts_reports and any(reports.values()):
            is_silent = reports == self._reports
            windows = {
                rank: replace(window, is_silent=is_silent, reported=_last_report(group.workers[rank].link))
                for rank, window in windows.items()
            }
        self._reports = reports
        if windows:
            self._reporter.post(Sampled(group.generation, windows))

    def _count_collectives(self, now_s: float) -> None:
        """Once a second, poll without waiting how many collectives the workers have entered."""
        if now_s < self._count_at_s:
            return
        self._count_at_s, group = now_s + _COUNT_EVERY_S, self._group
        counts = {rank: recorder.poll(now_s) for rank, recorder in group.recorders.items()}
        # One that has not replied yet may be anywhere: that sample proves nothing.
        known = {rank: each for rank, each in counts.items() if each is not None}
        if not known or len(known) < len(counts):
            return
        self._waits, shares = self._waits.after(known)
        if shares is None:
            return
        self.wait_shares, before = shares, self._suspect
        self._suspect = slow_rank(shares)
        rank = group.rank(self._suspect)
        if self._suspect >= 0 and self._suspect == before:
            text, wait = slow_text(rank, self._suspect, shares)
            if self._reporter.warn_once(f"slow rank {rank}", text):
                fields = {"rank": rank, "wait_percent": round(100 * wait), "lasted_s": 2 * WINDOW_SAMPLES, "text": text}
                self._reporter.timeline.stamp(group.generation, "slow", **fields)

    def _try_master(self) -> None:
        master = Endpoint(self._group.table.master_addr, self._group.table.master_port)
        for pause_s in (_MASTER_AFTER_S, 0.0):
            if not (why := connect_error(master)):
                return
            time.sleep(pause_s)
        if not self._is_over:
            self._reporter.warn(unreachable_text(master, why))

    def _write(self, order: KeepStacks) -> None:
        folder = self._run_dir.generation(order.generation)
        if folder is None:
            return
        path = folder / STACKS_FILE
        # Another hang of this generation is appended.
        file = LogFile(str(path), self._run_dir.warn, mode=0o600)
        if not file.write(order.text.encode(errors="backslashreplace")):
            self._reporter.warn(f"all stacks are in {path}")
        file.close()

    def _take(self, local_ranks: frozenset[int], then: Callable[[tuple[Stack, ...]], None]) -> None:
        """Call `then` in a thread, with the stacks of these workers and the state of torch's flight recorders.

        The core waits for a result: it gets an empty one if no stack can be taken.
        """
        group = self._group
        pids = {group.rank(local): pid for local, pid in group.pids.items() if local in local_ranks}
        recorders = {group.rank(local): each for local, each in group.recorders.items() if local in local_ranks}

        def take() -> None:
            found: tuple[Stack, ...] = ()
            try:
                found = stacks.take(pids)
                now_s = time.monotonic()
                entered = {rank: last_entered(recorder.fresh_counts(now_s)) for rank, recorder in recorders.items()}
                last = [entered.get(each.rank, ("", False)) for each in found]
                found = tuple(
                    replace(each, entered=text, waits=waits) for each, (text, waits) in zip(found, last, strict=True)
                )
            finally:
                then(found)

        if not start_thread(take, "elaunch-stacks"):
            then(())


def _last_report(link: Link) -> str:
    last = [f"step {link.step}"] if link.step >= 0 else []
    last += [f"its phase {link.phase[:_PHASE_MAX]!r}"] if link.phase else []
    return f"without a report since {', in '.join(last)}" if last else "without a report"


class Orphans:
    """Processes that workers of a successful generation have left behind: an upload, a daemon.

    Waits for those that `find` lists by pid, until they have done nothing for `grace_s`.

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
