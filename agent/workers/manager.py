"""Starts, reads, signals and tears down this node's workers, one generation at a time."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from elaunch.agent import linux
from elaunch.agent.config import AgentConfig, CannotRun
from elaunch.agent.core.actions import (
    Clear,
    NotifyWorkers,
    ReplaceForkServer,
    ShowStacks,
    SignalWorkers,
    Spawn,
    WorkerAction,
)
from elaunch.agent.core.events import Cleared, GroupFailed, Signalled, WorkerExited
from elaunch.agent.core.timeline import NO_GENERATION, WorkersSeen, of_seats
from elaunch.agent.diagnosis.causes.hardware import MORE_MEMORY
from elaunch.agent.diagnosis.causes.system import MORE_PROCESSES
from elaunch.agent.diagnosis.exit_status import with_tail
from elaunch.agent.diagnosis.investigate import KernelLog, counter_files, gather_facts
from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.guardian.client import GuardianClient
from elaunch.agent.output.pump import Pump
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.workers.exits import ExitReader, signal_name
from elaunch.agent.workers.group import LinkMonitor, Reporter, WorkerGroup
from elaunch.agent.workers.observers import Observers, Orphans, named
from elaunch.agent.workers.spawn import MasterPort, Spawner, warn_of_locks
from elaunch.rendezvous.format import node_host
from elaunch.rendezvous.types import FailureKind, RankTable

# An import that takes longer than this is logged: the user waits for it.
_PATIENCE_S = 10.0
# The sender of a SIGKILL is unknown.
_KILLED_PARENT = (
    "the fork server is the parent process of this node's ranks: a script that ends the job by killing its parent"
    " (os.kill(os.getppid(), SIGKILL)) should send SIGTERM, or exit with a code of its own; else find out what may"
    " have sent it SIGKILL"
)


@dataclass(frozen=True)
class Services:
    """The services of an agent's loop: the processes, the thread and the folder that `run.begin` starts and ends."""

    config: AgentConfig
    guardian: GuardianClient
    fork_server: ForkServer
    pump: Pump
    run_dir: RunDir


class Workers:
    """Carries out the agent's decisions about its workers.

    `links` queues the workers' messages, `port` is that of the next generation's store. All other events go to
    `reporter`, including what the fork server reports of the current generation; a fork server that is lost or silent
    is replaced. The agent's loop calls all methods, and waits for `selector`. Slow methods call `meanwhile` repeatedly.
    """

    def __init__(
        self, services: Services, reporter: Reporter, selector: selectors.BaseSelector, meanwhile: Callable[[], None]
    ) -> None:
        config, run_dir, fork_server = services.config, services.run_dir, services.fork_server
        self._config = config
        self._guardian = services.guardian
        self._pump = services.pump
        self._meanwhile = meanwhile
        self._reporter = reporter
        self._timeline = reporter.timeline
        self._fork_server = fork_server
        self._selector = selector
        self._run_dir = run_dir
        self.port = MasterPort(config)
        self._spawner = Spawner(config, run_dir, services.pump, fork_server)
        # Before any worker starts: it reads what the kernel logs from then on.
        self._log = KernelLog(counter_files())
        self.exits = ExitReader(node_host(socket.gethostname()), self._log, run_dir)
        self._is_ready = False
        self._patience_until_s = time.monotonic() + _PATIENCE_S if fork_server.preload else None
        # Until the first one there is a generation without workers.
        self._observe(WorkerGroup(RankTable(NO_GENERATION, (), "", 0, ""), 0))
        self._orphans: Orphans | None = None
        selector.register(fork_server, selectors.EVENT_READ, self._read_report)

    def _observe(self, group: WorkerGroup) -> None:
        """Make this the current generation, and sample its workers from now on."""
        self._group = group
        self.links = LinkMonitor(group, self._reporter, self._run_dir, self._check_fork_server)
        self._observers = Observers(
            group, self._reporter, self._run_dir, self._config.times, self._pump.do, has_store=self._spawner.has_store
        )

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock."""
        # The samples of processes wait for those of the links, which are due once a second.
        samples_s = self._observers.due_s if self.links.due_s is None else self.links.due_s
        left_s = self._orphans.due_s if self._orphans else None
        timers_s = (samples_s, self._patience_until_s, left_s)
        return min((at_s for at_s in timers_s if at_s is not None), default=None)

    def tick(self, now_s: float) -> None:
        self.links.tick(now_s)
        self._observers.tick(now_s)
        if self._patience_until_s is not None and now_s >= self._patience_until_s:
            self._patience_until_s = None
            self._reporter.log(f"importing {', '.join(self._fork_server.preload or ())} once for all workers …")

    def seen(self, now_s: float) -> WorkersSeen | None:
        """The state of the last generation's workers; None before the first one."""
        return self.links.seen(now_s, self._observers.wait_shares)

    def steps(self) -> dict[int, int]:
        """The newest step of each rank that has reported one. Any thread may call it."""
        return {worker.rank: worker.link.step for worker in [*self._group.workers] if worker.link.step >= 0}

    def act(self, order: WorkerAction, *, is_ending: bool) -> None:
        """Carry out an action. With `is_ending` the agent exits after this generation."""
        match order:
            case Spawn(table, group_rank):
                self.end_orphans("the workers start again")
                self._spawn(table, group_rank)
            case SignalWorkers():
                self._signal(order, is_ending=is_ending)
            case NotifyWorkers():
                self.links.notify(order)
                if not isinstance(order.message, ShowStacks):
                    self._continue(order.local_ranks)
            case Clear():
                self._clear(order)
            case ReplaceForkServer(generation):
                self._replace_fork_server(generation, "did not answer")
            case _:
                self._observers.act(order)

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
        warn_of_locks({**self._config.environment, **self._config.worker_env}, self._reporter.warn)
        when, _, debugged = self._config.worker_env.get("ELAUNCH_DEBUG", "").partition(" ")
        if when and debugged not in ("any", *map(str, range(table.world_size))):
            raise CannotRun(f"there is no rank {debugged} to debug; the job's ranks are 0 to {table.world_size - 1}")
        if group_rank != 0 or not self._spawner.has_store:
            # No worker store of this node takes the port: rank 0 binds one, here or on another node.
            self.port.close()
        try:
            self._spawner.start(group, self.port.listener)
        except (BrokenPipeError, ConnectionResetError):
            # The fork server has exited. `_read_report` handles that.
            return
        except OSError as error:
            self._replace_fork_server(generation, f"could not be given the workers: {error.strerror}")
            return
        finally:
            self.port.release()
            self._observe(group)
            self._selector.register(self.links, selectors.EVENT_READ, self.links.read_ready)
        self._timeline.stamp(generation, "ordered")
        self._guardian.note(generation=generation, workers=group.slots)

    def _signal(self, order: SignalWorkers, *, is_ending: bool) -> None:
        """Signal workers. If the agent is ending and the fork server still imports, no worker runs: end that server."""
        stage = "killing" if order.signum == signal.SIGKILL else "stopping"
        name, count = signal_name(-order.signum), len(order.local_ranks)
        self._timeline.stamp(order.generation, stage, signal=name, workers=count)
        if is_ending and not self._is_ready:
            # No worker is there yet, so none has anything to save.
            if self._fork_server.fileno() >= 0:
                self._selector.unregister(self._fork_server)
                self._fork_server.stop()
                self._lost(order.generation, "the fork server was stopped", FailureKind.TEMPLATE_LOST)
            return
        if order.signum == signal.SIGINT:
            self._group.is_interrupted = True
        # The first exit would release the others from a collective: their handlers would start, and be cut short.
        signals = (signal.SIGSTOP, order.signum) if order.signum == signal.SIGKILL and count > 1 else (order.signum,)
        with suppress(OSError):
            for signum in signals:
                self._spawner.signal(self._group, order.local_ranks, signum)
        if order.signum != signal.SIGKILL:
            self._continue(order.local_ranks)

    def _continue(self, local_ranks: Collection[int]) -> None:
        """Continue workers that a SIGSTOP holds: they are to end, but cannot save or handle a signal while stopped."""
        ordered = [worker for worker in self._group.workers if worker.local_rank in local_ranks]
        stopped = [worker.local_rank for worker in ordered if linux.state(worker.pid) == "T"]
        if stopped:
            with suppress(OSError):
                self._spawner.signal(self._group, stopped, signal.SIGCONT)
            numbers = ", ".join(map(str, stopped))
            self._reporter.warn(f"sent SIGCONT to local rank {numbers}: stopped by a signal (SIGSTOP), but must exit")

    def _clear(self, order: Clear) -> None:
        """End what is left of the generation and collect its output; posts `Cleared`."""
        generation = order.generation
        self._timeline.stamp(generation, "stopped")
        group = self._group
        if group.store:
            # This makes the store exit.
            group.store.close()
            group.store = None
        self._selector.unregister(self.links)
        self.links.end()
        self._observers.end()
        for worker in group.workers:
            if worker.crash_fd >= 0:
                os.close(worker.crash_fd)
        progressed = group.progressed
        if order.is_done and (left := self._find_orphans()):
            if not self._config.children_grace_s:
                self._reporter.log(f"ending {named(left)}: left behind at the end of the program (--children-grace 0)")
            else:
                self._orphans = Orphans(self._find_orphans, self._config.children_grace_s, self._reporter)
        if self._orphans:
            # Their output continues.
            self._timeline.stamp(generation, "cleared")
            self._reporter.post(Cleared(generation, progressed=progressed))
            return
        self._guardian.end_generation((self._fork_server.pid,), self._meanwhile)

        def drained(tails: dict[int, str]) -> None:
            self._timeline.stamp(generation, "cleared")
            try:
                failures = {rank: with_tail(f, tails.get(rank, "")) for rank, f in group.failures.items()}
                # Those that lost a peer are explained only if there is no other.
                causes = {rank: f for rank, f in failures.items() if not f.kind.is_secondary} or failures
                gather_facts(
                    causes.values(),
                    self._log,
                    lambda facts: self._reporter.post(Cleared(generation, tails, progressed, facts)),
                )
            except Exception:
                # Without this event the agent would wait for ever. A program's odd output must not cause that.
                self._reporter.post(Cleared(generation, tails, progressed))
                raise

        self._pump.drain(generation, drained)

    def _find_orphans(self) -> list[int]:
        fork_server = self._fork_server.pid
        # A process that has ended has no parent. The worker store is a child of the fork server, and about to end.
        return [pid for pid in self._guardian.left((fork_server,)) if linux.parent(pid) not in (0, fork_server)]

    def orphans_may_run(self, now_s: float) -> bool:
        """Whether the orphans may still run. The loop polls it after a success."""
        return self._orphans is not None and self._orphans.may_run(now_s)

    def end_orphans(self, why: str) -> None:
        """Kill the orphans of a successful generation, and collect its output."""
        if not self._orphans:
            return
        if left := self._find_orphans():
            self._reporter.log(f"ending {named(left)}: {why}")
        self._orphans = None
        self._guardian.end_generation((self._fork_server.pid,), self._meanwhile)
        self._pump.drain(self._group.generation, lambda _: None)

    def _check_fork_server(self) -> None:
        """A link has ended: replace a fork server that was stopped (SIGSTOP), since it reports no worker's death."""
        if self._fork_server.fileno() >= 0 and linux.state(self._fork_server.pid) == "T":
            self._replace_fork_server(self._group.generation, "was stopped by a signal when a worker exited")

    def _replace_fork_server(self, generation: int, how: str) -> None:
        """End the fork server and its workers, and start another."""
        self._selector.unregister(self._fork_server)
        self._fork_server.stop()
        self._restart(generation, how)

    def _read_report(self) -> None:
        try:
            report = self._fork_server.receive()
        except BlockingIOError:
            return
        if report is None:
            self._selector.unregister(self._fork_server)
            how, pid = self._fork_server.lost(), self._fork_server.pid
            if not self._is_ready and self._fork_server.preload is not None:
                self._reporter.warn(
                    "the fork server ended while it imported; each worker starts as a fresh interpreter"
                )
                self._fork_server.preload_nothing()
            self._restart(self._group.generation, how, pid)
            return
        group = self._group
        # Events of another generation change nothing.
        is_current = report.get("generation") == group.generation
        match report["event"]:
            case "ready":
                self._ready(report["reason"], report["left_out"])
            case "forked" if is_current:
                self._stamp_process(group, "forked", report)
                if report["key"] != "store":
                    worker = group.workers[report["key"]]
                    worker.pid, worker.since_s = report["pid"], time.monotonic()
            case "signal" if is_current and isinstance(report["key"], int):
                name = signal.Signals(report["signum"]).name
                by = f"{name} from rank {group.rank(report['key'])} to its parent process"
                # A signal to a launcher ends the job.
                self._reporter.post(Signalled(signal.SIGINT, by, is_order=True))
            case "unstarted" if is_current:
                self._unstarted(group, report["key"], report["why"])
            case "exited" if is_current:
                self._exited(group, report)

    def _ready(self, reason: str, left_out: Sequence[str]) -> None:
        self._is_ready = True
        self._patience_until_s = None
        self._timeline.stamp(self._group.generation, "fork_server_ready", pid=self._fork_server.pid)
        for sentence in left_out:
            self._reporter.log(sentence)
        if reason:
            self._fork_server.preload_nothing()
            self._reporter.warn(f"each worker starts as a fresh interpreter, which is slower: {reason}")

    def _stamp_process(self, group: WorkerGroup, event: str, report: dict[str, int | str]) -> None:
        """Stamp a stage of one process: `event` with the ranks of a worker, or `store_<event>`."""
        fields: dict[str, int | str] = {name: value for name, value in report.items() if name in ("pid", "code")}
        if report["key"] == "store":
            self._timeline.stamp(group.generation, f"store_{event}", **fields)
        else:
            local_rank = int(report["key"])
            self._timeline.stamp(group.generation, event, rank=group.rank(local_rank), local_rank=local_rank, **fields)

    def _exited(self, group: WorkerGroup, report: dict[str, int | str]) -> None:
        self._stamp_process(group, "exited", report)
        pid, code = int(report["pid"]), int(report["code"])
        if report["key"] != "store":
            self._reporter.post(self.exits.exited(group, group.workers[int(report["key"])], code))
        elif group.store:
            error, group.store = _error_of(group.store), None
            how = error or (f"was killed by {signal_name(code)}" if code < 0 else f"exited with code {code}")
            self._lost(group.generation, f"the worker store {how}", FailureKind.STORE_LOST, pid)

    def _unstarted(self, group: WorkerGroup, key: int | str, why: str) -> None:
        """The fork server could not fork: no memory, or too many processes."""
        what = "the worker store" if key == "store" else f"the worker of local rank {key}"
        message = f"{what} could not be started ({why})"
        failure = self._reporter.node_failure(FailureKind.SPAWN, group.generation, message)
        if why == os.strerror(errno.EAGAIN):
            failure = replace(failure, advice=MORE_PROCESSES)
        if key == "store":
            self._reporter.post(GroupFailed(group.generation, failure))
        else:
            self._reporter.post(WorkerExited(group.generation, int(key), 1, failure))

    def _restart(self, generation: int, how: str, pid: int = -1) -> None:
        """Start another fork server for the next generation; the workers of this one died with theirs."""
        self._is_ready = False
        self._fork_server.restart()
        self._selector.register(self._fork_server, selectors.EVENT_READ, self._read_report)
        self._lost(generation, f"the fork server {how}", FailureKind.TEMPLATE_LOST, pid)

    def _lost(self, generation: int, message: str, kind: FailureKind, pid: int = -1) -> None:
        """Post that the fork server and all workers are gone (TEMPLATE_LOST), or the worker store (other kinds).

        If SIGKILL ended it, the kernel may have killed process `pid` for lack of memory.
        """
        was_killed = message.endswith(signal.SIGKILL.name)
        memory = self.exits.oom_text(pid) if was_killed else ""
        failure = self._reporter.node_failure(kind, generation, f"{message} ({memory})" if memory else message)
        if memory:
            failure = replace(failure, advice=MORE_MEMORY.format(limit=""))
        elif kind is FailureKind.TEMPLATE_LOST and was_killed:
            failure = replace(failure, advice=_KILLED_PARENT)
            # Before the first fork it had no workers.
            if generation == self._group.generation and self._group.pids:
                failure = self.exits.parent_killed(self._group, failure)
        self._reporter.post(GroupFailed(generation, failure, workers_too=kind is FailureKind.TEMPLATE_LOST))


def _error_of(store: socket.socket) -> str:
    """The text of the error that a worker store reported before it ended. Empty if it reported none."""
    with store, suppress(OSError):
        if packet := wire.receive(store):
            return f"failed: {packet[0]['error']}"
    return ""
