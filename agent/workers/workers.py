"""Starts, reads, signals and clears away this node's workers, one generation at a time."""

from __future__ import annotations

import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from elaunch.agent.core.actions import Blame, KeepStacks, LookAtStacks, SignalWorkers, TakeStacks, TellWorkers
from elaunch.agent.core.entries import of_seats
from elaunch.agent.core.events import Cleared, LinkEvent, Reported, Sampled
from elaunch.agent.core.failures import with_tail
from elaunch.agent.core.messages import ShowStacks, StopAtStepBoundary, StopReason
from elaunch.agent.services import Services
from elaunch.agent.workers.exits import ExitReader, signal_name
from elaunch.agent.workers.fork_server_monitor import ForkServerMonitor
from elaunch.agent.workers.group import CurrentGroup, WorkerGroup
from elaunch.agent.workers.hang_monitor import HangMonitor
from elaunch.agent.workers.investigator import Investigator
from elaunch.agent.workers.kernel_log import KernelLog
from elaunch.agent.workers.link_monitor import LinkMonitor
from elaunch.agent.workers.master_port import MasterPort
from elaunch.agent.workers.oom import OutOfMemoryWatch
from elaunch.agent.workers.prompts import PromptWatch
from elaunch.agent.workers.reporter import Reporter
from elaunch.agent.workers.slow_monitor import SlowMonitor
from elaunch.agent.workers.spawner import Spawner
from elaunch.agent.workers.stdio import Stdio
from elaunch.rendezvous.types import RankTable

if TYPE_CHECKING:
    from elaunch.agent.core.node_report import WorkersSeen

_RANKS_SHOWN = 8
# Less than the second after which the links wake the loop.
_COUNT_EVERY_S = 0.9


class Workers:
    """Carries out what the agent decides about its workers.

    The workers' messages on their links are kept for `take_news`. All other events go to `reporter`. The agent's loop
    calls all methods, and waits for `selector`.
    """

    def __init__(self, services: Services, reporter: Reporter, selector: selectors.BaseSelector) -> None:
        config, run_dir, fork_server = services.config, services.run_dir, services.fork_server
        self._guardian = services.guardian
        self._pump = services.pump
        self._reporter = reporter
        self._timeline = reporter.timeline
        self._fork_server = fork_server
        self._current = CurrentGroup()
        self._port = MasterPort(config)
        self._spawner = Spawner(config, run_dir, Stdio(config, services.pump, run_dir), fork_server)
        # Before any worker starts: it reads what the kernel says from then on.
        log = KernelLog()
        self._investigator = Investigator(log)
        exits = ExitReader(socket.gethostname(), OutOfMemoryWatch(log))
        self._monitor = ForkServerMonitor(fork_server, self._current, exits, reporter, selector)
        self._prompts = PromptWatch(reporter)
        hang_timeout_s = config.times.hang_timeout_s
        self._links = LinkMonitor(self._current, reporter, run_dir, hang_timeout_s, self._monitor.check)
        self._hangs = HangMonitor(self._current, reporter, run_dir, config.times.hang_after_s, services.pump.do)
        self._slow = SlowMonitor(reporter)
        self._samples: deque[Sampled] = deque()
        self._count_at_s = 0.0
        selector.register(self._links, selectors.EVENT_READ, self._links.read_ready)

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock."""
        # A look at the processes waits for the look at the links, which is due once a second.
        looks_s = self._hangs.due_s if self._links.due_s is None else self._links.due_s
        timers_s = (looks_s, self._monitor.due_s, self._prompts.due_s)
        return min((at_s for at_s in timers_s if at_s is not None), default=None)

    def tick(self, now_s: float, *, is_quiet: bool) -> None:
        """Do what is due. `is_quiet` says that no descriptor of the selector had anything to read."""
        self._links.tick(now_s)
        if sample := self._hangs.sample(now_s):
            self._samples.append(sample)
            self._slow.sampled(self._current.group, sample.windows)
        # After the sample: what the answers do to a worker is in its next window.
        self._count_collectives(now_s)
        self._monitor.tick(now_s, is_quiet=is_quiet)
        self._prompts.tick(now_s)

    def _count_collectives(self, now_s: float) -> None:
        """Once a second, ask the workers how many collectives they have entered. They are not waited for."""
        group = self._current.latest
        if group is None or now_s < self._count_at_s or not self._hangs.is_on:
            return
        self._count_at_s = now_s + _COUNT_EVERY_S
        counts = {rank: recorder.look(now_s) for rank, recorder in group.recorders.items()}
        # One that has not answered yet may be anywhere: that look says nothing.
        known = {rank: each for rank, each in counts.items() if each is not None}
        if known and len(known) == len(counts):
            self._slow.counted(group, known)

    def read_links(self) -> None:
        """Read all links now: how workers are stopped depends on their messages."""
        self._links.read_all()

    def take_news(self) -> Iterator[LinkEvent | Reported | Sampled]:
        """The messages of workers since the last call, in the order in which each worker sent them; then samples."""
        yield from self._links.take_news()
        while self._samples:
            yield self._samples.popleft()

    def seen(self, now_s: float) -> WorkersSeen | None:
        """How the workers of the last generation are; None before the first one."""
        return self._links.seen(now_s)

    def steps(self) -> dict[int, int]:
        """The newest step of each rank that has reported one. Any thread may call it."""
        group = self._current.latest
        links = list(group.links.items()) if group else []
        return {group.rank(local_rank): link.step for local_rank, link in links if group and link.step >= 0}

    @property
    def steps_per_s(self) -> float:
        """How fast this node's workers were, over the last ten seconds or more."""
        return self._links.steps_per_s

    def reserve_port(self) -> int:
        """The port of the next generation's worker store, if that is this node's. Raises NoPort."""
        return self._port.reserve()

    def spawn(self, table: RankTable, group_rank: int) -> None:
        """Begin a generation: have the fork server start its workers, and its store if this node has rank 0."""
        generation = table.generation
        seat = table.seats[group_rank]
        self._timeline.stamp(
            generation,
            "sealed",
            world_size=table.world_size,
            first_rank=seat.first_rank,
            workers=seat.slots,
            nodes=of_seats(table),
            reason=table.reason,
            restarts=table.restarts,
        )
        group = WorkerGroup(table, group_rank, self._guardian.cgroup.generation(generation))
        self._current.begin(group)
        if group_rank != 0 or not self._spawner.has_store:
            # No worker store of this node takes the port: rank 0 binds one, here or on another node.
            self._port.close()
        try:
            self._spawner.start(group, self._port.listener)
        except (BrokenPipeError, ConnectionResetError):
            # The fork server is gone. The monitor reads the same from its socket, and handles it there.
            return
        except OSError as error:
            self._monitor.replace(generation, f"could not be given the workers: {error.strerror}")
            return
        finally:
            self._port.release()
        self._timeline.stamp(generation, "ordered")
        self._links.begin(group)
        self._hangs.begin()
        self._monitor.watch_store(group)

    def signal(self, order: SignalWorkers, *, is_ending: bool) -> None:
        """Signal workers. If the agent is ending and the fork server still imports, no worker runs: end that server."""
        stage = "killing" if order.signum == signal.SIGKILL else "stopping"
        name, count = signal_name(-order.signum), len(order.local_ranks)
        self._timeline.stamp(order.generation, stage, signal=name, workers=count)
        if is_ending and not self._monitor.is_ready:
            self._monitor.abandon_import(order.generation)
            return
        if order.signum == signal.SIGINT:
            self._prompts.interrupt(self._current.group, order.local_ranks)
        for local_rank in order.local_ranks:
            try:
                self._spawner.signal(self._current.group, local_rank, order.signum)
            except OSError:
                return

    def tell(self, order: TellWorkers) -> None:
        """Send workers a message on their links."""
        if isinstance(order.message, StopAtStepBoundary) and order.message.reason is StopReason.INTERRUPT:
            self._prompts.interrupt(self._current.group, order.local_ranks)
        self._links.tell(order)

    def take_stacks(self, order: TakeStacks) -> None:
        """Log what workers are doing. Posts `WorkersHung`."""
        self.tell(TellWorkers(order.generation, order.listening, ShowStacks()))
        self._hangs.take_stacks(order)

    def look_at_stacks(self, order: LookAtStacks) -> None:
        """Take workers' stacks. Posts `StacksTaken`."""
        self._hangs.look_at_stacks(order)

    def keep_stacks(self, order: KeepStacks) -> None:
        """Write stacks to a file, if the user keeps logs."""
        self._hangs.keep_stacks(order)

    def blame(self, order: Blame) -> None:
        """Make a failure of a hang. Posts `WorkersHung`."""
        self._hangs.blame(order)

    def replace_fork_server(self, generation: int) -> None:
        """End a fork server that does not answer, and start another; posts `ServiceLost`."""
        self._monitor.replace(generation, "did not answer")

    def clear(self, generation: int, meanwhile: Callable[[], None]) -> None:
        """End what is left of the generation and collect its output; posts `Cleared`.

        It may take seconds: `meanwhile` is called again and again then.
        """
        self._timeline.stamp(generation, "stopped")
        group = self._current.group
        self._monitor.unwatch_store(group)
        if group.store:
            group.reached_store, group.store = group.store.end(), None
        self._links.end(group)
        self._hangs.end()
        group.close_crash_files()
        self._guardian.end_generation(generation, self._fork_server.pid, meanwhile)
        reached, progressed = group.reached_store, group.progressed or group.lasted

        def drained(tails: dict[int, str], folded: dict[int, int]) -> None:
            self._timeline.stamp(generation, "cleared")
            if folded:
                self._reporter.say(_said_of_folded({group.rank(rank): lines for rank, lines in folded.items()}))
            try:
                failures = {rank: with_tail(f, tails.get(rank, ""), reached) for rank, f in group.failures.items()}
                self._investigator.look_into(
                    failures, lambda facts: self._reporter.post(Cleared(generation, tails, reached, progressed, facts))
                )
            except Exception:
                # Without this event the agent would wait for ever. A program's odd output must not do that.
                self._reporter.post(Cleared(generation, tails, reached, progressed))
                raise

        self._pump.drain(generation, drained)


def _said_of_folded(lines: dict[int, int]) -> str:
    """What the log says of tracebacks that the console did not get. `lines` counts their lines by rank."""
    ranks = [str(rank) for rank in sorted(lines)]
    their, are = ("its traceback", "is") if len(ranks) == 1 else ("their tracebacks", "are")
    if len(ranks) > _RANKS_SHOWN:
        ranks = [*ranks[:_RANKS_SHOWN], f"{len(ranks) - _RANKS_SHOWN} more"]
    who = f"{', '.join(ranks[:-1])} and {ranks[-1]}" if len(ranks) > 1 else ranks[0]
    count = sum(lines.values())
    return (
        f"rank {who} lost a peer and ended; {their} ({count} lines) {are} not shown (--show-all-tracebacks shows all)"
    )
