"""Starts, reads, signals and clears away this node's workers, one generation at a time."""

from __future__ import annotations

import selectors
import signal
import socket
from collections.abc import Callable, Iterator

from elaunch.agent.core.actions import SignalWorkers, TakeStacks, TellWorkers
from elaunch.agent.core.events import Cleared, LinkEvent, Reported
from elaunch.agent.services import Services
from elaunch.agent.workers.exits import ExitReader, signal_name
from elaunch.agent.workers.fork_server_monitor import ForkServerMonitor
from elaunch.agent.workers.group import CurrentGroup, WorkerGroup
from elaunch.agent.workers.link_monitor import LinkMonitor
from elaunch.agent.workers.master_port import MasterPort
from elaunch.agent.workers.reporter import Reporter
from elaunch.agent.workers.spawner import Spawner
from elaunch.agent.workers.stdio import Stdio
from elaunch.rendezvous.types import RankTable


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
        exits = ExitReader(socket.gethostname())
        self._monitor = ForkServerMonitor(fork_server, self._current, exits, reporter, selector)
        hang_timeout_s = config.times.hang_timeout_s
        self._links = LinkMonitor(self._current, reporter, run_dir, hang_timeout_s, self._monitor.check)
        selector.register(self._links, selectors.EVENT_READ, self._links.read_ready)

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock."""
        timers_s = (self._links.due_s, self._monitor.due_s)
        return min((at_s for at_s in timers_s if at_s is not None), default=None)

    def tick(self, now_s: float, *, is_quiet: bool) -> None:
        """Do what is due. `is_quiet` says that no descriptor of the selector had anything to read."""
        self._links.tick(now_s)
        self._monitor.tick(now_s, is_quiet=is_quiet)

    def read_links(self) -> None:
        """Read all links now: how workers are stopped depends on their messages."""
        self._links.read_all()

    def take_news(self) -> Iterator[LinkEvent | Reported]:
        """The messages of workers since the last call, in the order in which each worker sent them."""
        return self._links.take_news()

    def reserve_port(self) -> int:
        """The port of the next generation's worker store, if that is this node's. Raises NoPort."""
        return self._port.reserve()

    def spawn(self, table: RankTable, group_rank: int) -> None:
        """Begin a generation: have the fork server start its workers, and its store if this node has rank 0."""
        generation = table.generation
        self._timeline.stamp(generation, "sealed", world_size=table.world_size)
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
        self._monitor.watch_store(group)

    def signal(self, order: SignalWorkers, *, is_ending: bool) -> None:
        """Signal workers. If the agent is ending and the fork server still imports, no worker runs: end that server."""
        stage = "killing" if order.signum == signal.SIGKILL else "stopping"
        name, count = signal_name(-order.signum), len(order.local_ranks)
        self._timeline.stamp(order.generation, stage, signal=name, workers=count)
        if is_ending and not self._monitor.is_ready:
            self._monitor.abandon_import(order.generation)
            return
        for local_rank in order.local_ranks:
            try:
                self._spawner.signal(self._current.group, local_rank, order.signum)
            except OSError:
                return

    def tell(self, order: TellWorkers) -> None:
        """Send workers a message on their links."""
        self._links.tell(order)

    def take_stacks(self, order: TakeStacks) -> None:
        """Log what workers are doing. Posts `WorkersHung`."""
        self._links.take_stacks(order)

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
        self._guardian.end_generation(generation, self._fork_server.pid, meanwhile)
        reached, progressed = group.reached_store, group.progressed or group.lasted

        def drained(tails: dict[int, str]) -> None:
            self._timeline.stamp(generation, "cleared")
            self._reporter.post(Cleared(generation, tails, reached, progressed))

        self._pump.drain(generation, drained)
