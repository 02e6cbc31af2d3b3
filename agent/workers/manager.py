"""Starts, reads, signals and clears away this node's workers, one generation at a time."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elaunch.agent import linux
from elaunch.agent.config import AgentConfig
from elaunch.agent.core.actions import (
    Blame,
    Clear,
    KeepStacks,
    LookAtStacks,
    NameThreads,
    ReplaceForkServer,
    SignalWorkers,
    Spawn,
    TellWorkers,
    ToWorkers,
)
from elaunch.agent.core.events import Cleared
from elaunch.agent.core.timeline import WorkersSeen, of_seats
from elaunch.agent.diagnosis.exit_status import with_tail
from elaunch.agent.diagnosis.investigate import look_into
from elaunch.agent.diagnosis.oom import KernelLog, counter_files
from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.guardian.client import GuardianClient
from elaunch.agent.output.pump import Pump
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.workers.exits import ExitReader, signal_name
from elaunch.agent.workers.fork_server_monitor import ForkServerMonitor
from elaunch.agent.workers.group import CurrentGroup, Reporter, WorkerGroup
from elaunch.agent.workers.link_monitor import LinkMonitor
from elaunch.agent.workers.observers import Observers
from elaunch.agent.workers.orphans import Leftovers, named
from elaunch.agent.workers.spawn import MasterPort, Spawner, warn_of_locks
from elaunch.agent.workers.stdio import Stdio
from elaunch.rendezvous.texts import node_host
from elaunch.rendezvous.types import RankTable


@dataclass(frozen=True)
class Services:
    """What an agent's loop works with: the processes, the thread and the folder that `run.begin` starts and ends."""

    config: AgentConfig
    guardian: GuardianClient
    fork_server: ForkServer
    pump: Pump
    run_dir: RunDir


WorkerAction = Spawn | ToWorkers | Clear | ReplaceForkServer


class Workers:
    """Carries out what the agent decides about its workers.

    `links` keeps the workers' messages, and `port` is of the next generation's store. All other events go to
    `reporter`. The agent's loop calls all methods, and waits for `selector`. What takes seconds calls `meanwhile` again
    and again.
    """

    def __init__(
        self,
        services: Services,
        reporter: Reporter,
        selector: selectors.BaseSelector,
        meanwhile: Callable[[], None],
    ) -> None:
        config, run_dir, fork_server = services.config, services.run_dir, services.fork_server
        self._guardian = services.guardian
        self._pump = services.pump
        self._meanwhile = meanwhile
        self._reporter = reporter
        self._timeline = reporter.timeline
        self._fork_server = fork_server
        self._current = CurrentGroup()
        self.port = MasterPort(config)
        self._spawner = Spawner(config, run_dir, Stdio(config, services.pump, run_dir), fork_server)
        # Before any worker starts: it reads what the kernel says from then on.
        self._log = KernelLog(counter_files())
        self.exits = ExitReader(node_host(socket.gethostname()), self._log, run_dir)
        self._monitor = ForkServerMonitor(fork_server, self._current, self.exits, reporter, selector)
        self._environ, self._warn = {**config.environment, **config.worker_env}, reporter.warn
        self.links = LinkMonitor(self._current, reporter, run_dir, self._monitor.check)
        self._observers = Observers(self._current, reporter, run_dir, config.times, services.pump.do)
        self._children_grace_s = config.children_grace_s
        self._leftovers: Leftovers | None = None
        selector.register(self.links, selectors.EVENT_READ, self.links.read_ready)

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock."""
        # A look at the processes waits for the look at the links, which is due once a second.
        looks_s = self._observers.due_s if self.links.due_s is None else self.links.due_s
        left_s = self._leftovers.due_s if self._leftovers else None
        timers_s = (looks_s, self._monitor.due_s, left_s)
        return min((at_s for at_s in timers_s if at_s is not None), default=None)

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        self.links.tick(now_s)
        self._observers.tick(now_s)
        self._monitor.tick(now_s)

    def seen(self, now_s: float) -> WorkersSeen | None:
        """How the workers of the last generation are; None before the first one."""
        return self.links.seen(now_s, self._observers.wait_shares)

    def steps(self) -> dict[int, int]:
        """The newest step of each rank that has reported one. Any thread may call it."""
        group = self._current.latest
        links = list(group.links.items()) if group else []
        return {group.rank(local_rank): link.step for local_rank, link in links if group and link.step >= 0}

    def act(self, order: WorkerAction, *, is_ending: bool) -> None:
        """Carry out what was decided. `is_ending` says that the agent exits after this generation."""
        match order:
            case Spawn(table, group_rank):
                self.end_leftovers("the workers start again")
                self._spawn(table, group_rank)
            case SignalWorkers():
                self._signal(order, is_ending=is_ending)
            case TellWorkers():
                self.links.tell(order)
            case LookAtStacks():
                self._observers.look_at_stacks(order)
            case NameThreads():
                self._observers.name_threads(order)
            case KeepStacks():
                self._observers.keep_stacks(order)
            case Blame():
                self._observers.blame(order)
            case Clear():
                self._clear(order)
            case ReplaceForkServer(generation):
                self._monitor.replace(generation, "did not answer")

    def _spawn(self, table: RankTable, group_rank: int) -> None:
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
        group = WorkerGroup(table, group_rank)
        self._current.latest = group
        self._observers.begin(has_store=self._spawner.has_store)
        warn_of_locks(self._environ, self._warn)
        if group_rank != 0 or not self._spawner.has_store:
            # No worker store of this node takes the port: rank 0 binds one, here or on another node.
            self.port.close()
        try:
            self._spawner.start(group, self.port.listener)
        except (BrokenPipeError, ConnectionResetError):
            # The fork server is gone. The monitor reads the same from its socket, and handles it there.
            return
        except OSError as error:
            self._monitor.replace(generation, f"could not be given the workers: {error.strerror}")
            return
        finally:
            self.port.release()
        self._timeline.stamp(generation, "ordered")
        self._guardian.note(generation=generation, workers=group.slots)
        self.links.begin(group)

    def _signal(self, order: SignalWorkers, *, is_ending: bool) -> None:
        """Signal workers. If the agent is ending and the fork server still imports, no worker runs: end that server."""
        stage = "killing" if order.signum == signal.SIGKILL else "stopping"
        name, count = signal_name(-order.signum), len(order.local_ranks)
        self._timeline.stamp(order.generation, stage, signal=name, workers=count)
        if is_ending and not self._monitor.is_ready:
            self._monitor.abandon_import(order.generation)
            return
        if order.signum == signal.SIGINT:
            self._current.group.is_interrupted = True
        # The end of the first would free the others from a collective: a handler would begin to run, and be cut short.
        signals = (signal.SIGSTOP, order.signum) if order.signum == signal.SIGKILL and count > 1 else (order.signum,)
        with suppress(OSError):
            for signum in signals:
                self._spawner.signal(self._current.group, order.local_ranks, signum)

    def _clear(self, order: Clear) -> None:
        """End what is left of the generation and collect its output; posts `Cleared`."""
        generation = order.generation
        self._timeline.stamp(generation, "stopped")
        group = self._current.group
        if group.store:
            # A restart would wait for the store's answer, on the CPUs on which old workers end.
            group.reached_store, group.store = group.store.end(is_used=group.has_used_store), None
        self.links.end(group)
        self._observers.end()
        while group.crash_fds:
            os.close(group.crash_fds.popitem()[1])
        reached, progressed = group.reached_store, group.progressed or group.lasted
        if order.is_done and (left := self._find_leftovers()):
            if not self._children_grace_s:
                self._reporter.say(f"ending {named(left)}: left behind at the end of the program (--children-grace 0)")
            else:
                self._leftovers = Leftovers(self._find_leftovers, self._children_grace_s, self._reporter)
        if self._leftovers:
            # Their output goes on.
            self._timeline.stamp(generation, "cleared")
            self._reporter.post(Cleared(generation, {}, reached, progressed))
            return
        self._guardian.end_generation((self._fork_server.pid,), self._meanwhile)

        def drained(tails: dict[int, str]) -> None:
            self._timeline.stamp(generation, "cleared")
            try:
                failures = {rank: with_tail(f, tails.get(rank, ""), reached) for rank, f in group.failures.items()}
                # Those that lost a peer are explained only if there is no other.
                causes = {rank: f for rank, f in failures.items() if not f.kind.is_secondary} or failures
                look_into(
                    causes.values(),
                    self._log,
                    lambda facts: self._reporter.post(Cleared(generation, tails, reached, progressed, facts)),
                )
            except Exception:
                # Without this event the agent would wait for ever. A program's odd output must not do that.
                self._reporter.post(Cleared(generation, tails, reached, progressed))
                raise

        self._pump.drain(generation, drained)

    def _find_leftovers(self) -> list[int]:
        fork_server = self._fork_server.pid
        # A process that has ended has no parent. The worker store is a child of the fork server, and about to end.
        return [pid for pid in self._guardian.left((fork_server,)) if linux.parent(pid) not in (0, fork_server)]

    def leftovers_go_on(self, now_s: float) -> bool:
        """Whether what the workers have left behind still may go on. The loop asks again and again after a success."""
        return self._leftovers is not None and self._leftovers.go_on(now_s)

    def end_leftovers(self, why: str) -> None:
        """End what workers of a generation that has ended well have left behind, and collect its output."""
        if not self._leftovers:
            return
        if left := self._find_leftovers():
            self._reporter.say(f"ending {named(left)}: {why}")
        self._leftovers = None
        self._guardian.end_generation((self._fork_server.pid,), self._meanwhile)
        self._pump.drain(self._current.generation, lambda _: None)
