"""The agent: one inbox, one loop, and the hands that carry out what `core.step` decides."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from elaunch.agent.config import AgentConfig
from elaunch.agent.core.events import (
    Action,
    Clear,
    Cleared,
    Commit,
    Committed,
    Event,
    Exit,
    Join,
    OwnStoreLost,
    Renew,
    ReplaceForkServer,
    Say,
    SignalWorkers,
    Spawn,
    Tag,
    TakeStacks,
    TellWorkers,
    Tick,
    Widen,
)
from elaunch.agent.core.state import Agent, Exited, Running, Stopping
from elaunch.agent.core.step import deadline_s, step
from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.guardian.client import Guard
from elaunch.agent.inbox import Inbox, LookAgain
from elaunch.agent.output.pump import Pump
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.output.timeline import NO_GENERATION, Timeline
from elaunch.agent.session.job_store import JobStore, LocalHost
from elaunch.agent.session.process_identity import this_process
from elaunch.agent.session.session import Session
from elaunch.agent.workers.fork_servers import Servers
from elaunch.agent.workers.group import Group
from elaunch.agent.workers.link_monitor import Hearing
from elaunch.agent.workers.master_port import reserve
from elaunch.agent.workers.spawner import Workers, signal_name
from elaunch.rendezvous.rules.entering import end, join
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot
from elaunch.rendezvous.store import Store
from elaunch.rendezvous.types import Failure, FailureKind, Joined, Node, Outcome, OutcomeKind, RankTable

_GUARDIANS_MAX = 20
# For the store to hear the last words; whoever waits for the prompt does not wait for it longer.
_FAREWELL_S = 2.0
# Where the store ends with this agent, for the others to read how the job ended.
_OUTLAST_S = 3.0
# epoll refuses a wait of more than 24 days.
_WAIT_MAX_S = 86_400.0


class Loop:
    """One agent's life, from joining to its outcome.

    `server` was started by the caller, before the heavier imports, with `guard.environment(config.environment)`.
    """

    def __init__(
        self,
        config: AgentConfig,
        store: Store,
        server: ForkServer,
        guard: Guard,
        pump: Pump,
        run_dir: RunDir,
        *,
        store_is_remote: bool = False,
        served_pid: int | None = None,
    ) -> None:
        self._config = config
        self._served_pid = served_pid
        self._guard = guard
        self._pump = pump
        self._inbox = Inbox()
        self._timeline = Timeline(run_dir.logs, run_dir.warn, pump.do)
        host, keys = socket.gethostname(), Keys(config.spec.run_id, config.store_prefix)
        self._workers = Workers(config, host, pump, run_dir)
        job_store = JobStore(store, keys, store_is_remote)
        self._session = Session(job_store, LocalHost(host), config.times, self._inbox.post)
        # The session names each incarnation of this node.
        node = Node("", host, config.master_addr, config.slots, this_process(), config.role, config.node_rank)
        me = replace(node, topology=config.topology)
        self._agent = Agent(me, config.spec, config.times, Snapshot(keys), config.notices)
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._servers = Servers(
            server,
            config,
            guard,
            self._workers,
            self._timeline,
            self._selector,
            self._inbox.post,
            pump.say,
            self._blameless,
        )
        self._hearing = Hearing(
            config, run_dir, self._servers, self._timeline, self._inbox.post, pump.say, self._blameless
        )

    def run(self) -> Outcome:
        """Live until the outcome is known; all workers are gone then."""
        self._timeline.stamp(NO_GENERATION, "started", pid=os.getpid(), workers=self._config.slots)
        self._inbox.catch(self._config.signals)
        for fd in self._inbox.fds:
            self._selector.register(fd, selectors.EVENT_READ)
        self._selector.register(self._hearing, selectors.EVENT_READ, self._hearing.hear)
        self._watch_guardian()
        if self._served_pid is not None:
            self._watch_store_process(self._served_pid)
        self._session.open()
        try:
            outcome = self._live()
            self._take_leave(outcome)
        finally:
            self._servers.now.stop()
            self._session.close(_FAREWELL_S, _OUTLAST_S if self._served_pid is not None else 0.0)
        self._inbox.release()
        return outcome

    def _take_leave(self, outcome: Outcome) -> None:
        """A store that this host serves ends with its agent: the others are told, or they would wait for it in vain."""
        snapshot = self._agent.snapshot
        if self._served_pid is None or snapshot.ended or snapshot.generation is None:
            return
        why = f"{self._agent.me.host}, which served the job's store, has ended its part: {outcome.reason}"
        told = replace(outcome, kind=OutcomeKind.UNKNOWN, reason=why, failure=None)
        self._session.commit(end(snapshot, told), None)

    def _live(self) -> Outcome:
        while not isinstance(self._agent.phase, Exited):
            event = self._inbox.take()
            if event is None:
                self._wait()
            elif isinstance(event, LookAgain):
                event = self._session.look()
            if event and isinstance(self._agent.phase, Running):
                # How workers are stopped depends on what they have said.
                self._hearing.listen_now()
            for said in self._hearing.news():
                self._take(said)
            if event:
                self._take(event)
        return self._agent.phase.outcome

    def _take(self, event: Event) -> None:
        known, (self._agent, actions) = self._agent.snapshot, step(self._agent, event, time.monotonic())
        self._note(event, known)
        for action in actions:
            self._act(action)

    def _note(self, event: Event, known: Snapshot) -> None:
        """On the timeline: this node hears of a new generation; the store has this node's word for it."""
        opened = self._agent.snapshot.generation
        if opened is None:
            return
        if known.generation is None or opened.number > known.generation.number:
            self._timeline.stamp(opened.number, "opened", kind=opened.kind.value)
        if isinstance(event, Committed) and event.tag is Tag.JOIN and event.held:
            self._timeline.stamp(opened.number, "joined")

    def _wait(self) -> None:
        due_s = deadline_s(self._agent)
        timers_s = (due_s, self._servers.due_s, self._hearing.due_s, self._session.due_s)
        wanted_s = [at_s for at_s in timers_s if at_s is not None]
        timeout_s = max(0.0, min(min(wanted_s) - time.monotonic(), _WAIT_MAX_S)) if wanted_s else None
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.data:
                key.data()
        now_s = time.monotonic()
        self._session.tick(now_s)
        self._hearing.tick(now_s)
        if due_s is not None and now_s >= due_s:
            self._inbox.post(Tick())
        self._servers.tick(now_s, is_quiet=not ready)

    def _act(self, action: Action) -> None:
        match action:
            case Commit(txn, tag):
                self._session.commit(txn, tag)
            case Join():
                self._join(action)
            case Renew():
                self._session.renew()
            case Widen():
                self._session.widen()
            case Spawn(table, group_rank):
                self._spawn(table, group_rank)
            case SignalWorkers(generation, local_ranks, signum):
                stage = "killing" if signum == signal.SIGKILL else "stopping"
                self._timeline.stamp(generation, stage, signal=signal_name(-signum), workers=len(local_ranks))
                if self._is_ending and not self._servers.is_ready:
                    self._servers.abandon_import(generation)
                else:
                    self._signal(local_ranks, signum)
            case TellWorkers():
                self._hearing.tell(action)
            case TakeStacks():
                self._hearing.take_stacks(action)
            case Clear(generation):
                self._clear(generation)
            case ReplaceForkServer(generation):
                self._servers.replace(generation, "did not answer")
            case Say(text):
                self._pump.say(text)
            case Exit(outcome):
                self._timeline.stamp(outcome.generation, "ended", outcome=outcome.kind.value, code=outcome.exit_code)

    def _join(self, order: Join) -> None:
        self._listener = self._listener or reserve(self._config)
        me = self._agent.me
        joined = Joined(me.node_id, self._listener.getsockname()[1], order.progressed)
        txn = join(self._agent.snapshot, me, joined, order.lease, is_member=order.is_member)
        self._session.commit(txn, Tag.JOIN)

    def _spawn(self, table: RankTable, group_rank: int) -> None:
        self._timeline.stamp(table.generation, "sealed", world_size=table.world_size)
        group = Group(table, group_rank, self._guard.cgroup.generation(table.generation))
        self._servers.group = group
        try:
            self._workers.start(self._servers.now, group, self._listener)
        except (BrokenPipeError, ConnectionResetError):
            # The fork server is gone; its socket says so as well, and that is where it is handled.
            return
        except OSError as error:
            self._servers.replace(table.generation, f"could not be given the workers: {error.strerror}")
            return
        finally:
            # The one port that was asked for stays ours: nobody can take it between two generations.
            if self._listener and not (len(self._config.master_ports) == 1 and self._workers.has_store):
                self._listener.close()
                self._listener = None
        self._timeline.stamp(table.generation, "ordered")
        self._hearing.begin(group)
        if group.store:
            self._selector.register(group.store, selectors.EVENT_READ, partial(self._servers.hear_store, group))

    def _signal(self, local_ranks: frozenset[int], signum: int) -> None:
        for local_rank in local_ranks:
            try:
                self._workers.signal(self._servers.now, self._group_now, local_rank, signum)
            except OSError:
                return

    @property
    def _is_ending(self) -> bool:
        return isinstance(self._agent.phase, Stopping) and self._agent.phase.then is not None

    @property
    def _group_now(self) -> Group:
        assert self._servers.group is not None
        return self._servers.group

    def _clear(self, generation: int) -> None:
        self._timeline.stamp(generation, "stopped")
        group = self._group_now
        self._servers.unwatch_store(group)
        self._workers.close_store(group)
        self._hearing.end(group)
        # The lease is kept meanwhile: this loop lives.
        self._guard.end_generation(generation, self._servers.now.pid, lambda: self._session.tick(time.monotonic()))
        reached, progressed = group.reached_store, group.progressed or group.lasted

        def drained(tails: dict[int, str]) -> None:
            self._timeline.stamp(generation, "cleared")
            self._inbox.post(Cleared(generation, tails, reached, progressed))

        self._pump.drain(generation, drained)

    def _blameless(self, kind: FailureKind, generation: int, message: str) -> Failure:
        me = self._agent.me
        return Failure(kind, generation, me.node_id, me.host, -1, -1, -1, None, message, failed_at=time.time())

    def _at_end_of(self, pid: int, do: Callable[[], None]) -> None:
        pidfd = os.pidfd_open(pid)

        def ended() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            do()

        self._selector.register(pidfd, selectors.EVENT_READ, ended)

    def _watch_store_process(self, pid: int) -> None:
        """Tell why the store has ended: no other agent can see it."""

        def ended() -> None:
            self._served_pid = None
            how = _how_it_ended(pid)
            self._inbox.post(OwnStoreLost(f"the job's store, which this host served (pid {pid}), {how}"))

        self._at_end_of(pid, ended)

    def _watch_guardian(self) -> None:
        def gone() -> None:
            if self._guard.renewals == _GUARDIANS_MAX:
                self._pump.say("the guardian keeps ending; going on without one: kill -9 may leave processes behind")
                return
            self._pump.say("the guardian was killed; starting another")
            self._guard.renew()
            self._watch_guardian()

        self._at_end_of(self._guard.pid, gone)


def _how_it_ended(pid: int) -> str:
    """How a child has ended, in words. The child is left for others to reap."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None or found.si_code == os.CLD_EXITED:
        return f"exited with code {found.si_status}" if found else "ended"
    return f"was killed by {signal_name(-found.si_status)}"
