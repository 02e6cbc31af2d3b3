"""The agent: one inbox, one loop, and the hands that carry out what `core.step` decides."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from elaunch.agent.config import AgentConfig
from elaunch.agent.core import KILL_WAIT_S, Agent, Exited, Stopping, deadline_s, step
from elaunch.agent.events import (
    Action,
    Clear,
    Cleared,
    Commit,
    Exit,
    Join,
    Looked,
    ReplaceForkServer,
    Say,
    ServiceLost,
    SignalWorkers,
    Spawn,
    Tick,
    WorkerExited,
    WorkerRaised,
)
from elaunch.agent.forkserver import ForkServer
from elaunch.agent.group import Group, Link
from elaunch.agent.guard import Guard
from elaunch.agent.inbox import Inbox
from elaunch.agent.port import reserve
from elaunch.agent.pump import Pump
from elaunch.agent.rundir import RunDir
from elaunch.agent.timeline import NO_GENERATION, Timeline
from elaunch.agent.workers import Workers, signal_name
from elaunch.rendezvous.forming import join
from elaunch.rendezvous.snapshot import Keys, Snapshot, read_snapshot
from elaunch.rendezvous.store import Store
from elaunch.rendezvous.types import Failure, FailureKind, Joined, Node, Outcome, RankTable

_FORK_S = 0.05
# Imports that take longer than this are worth a word to whoever waits.
_PATIENCE_S = 4.0
_GUARDIANS_MAX = 20


class Loop:
    """One agent's life, from joining to its outcome.

    `server` was started by the caller, before the heavier imports, with `guard.environment(config.environment)`.
    """

    def __init__(
        self, config: AgentConfig, store: Store, server: ForkServer, guard: Guard, pump: Pump, run_dir: RunDir
    ) -> None:
        host = socket.gethostname()
        node = Node(f"{host}-{secrets.token_hex(4)}", host, config.master_addr, config.slots, os.getpid())
        self._config = config
        self._keys = Keys(config.spec.run_id)
        self._store = store
        self._guard = guard
        self._pump = pump
        self._inbox = Inbox()
        self._timeline = Timeline(run_dir.logs, run_dir.warn, pump.do)
        self._workers = Workers(config, node.node_id, host, pump, run_dir)
        self._agent = Agent(node, config.spec, config.stop_grace_s, config.failure_grace_s, Snapshot(self._keys))
        self._selector = selectors.DefaultSelector()
        self._group: Group | None = None
        self._listener: socket.socket | None = None
        self._server = server
        self._server_ready = False
        self._answer_due_s: float | None = None
        self._preload = config.preload
        self._patience_until_s = time.monotonic() + _PATIENCE_S if config.preload else None

    def run(self) -> Outcome:
        """Live until the outcome is known; all workers are gone then."""
        self._timeline.stamp(NO_GENERATION, "started", pid=os.getpid(), workers=self._config.slots)
        self._inbox.catch(self._config.signals)
        for fd in self._inbox.fds:
            self._selector.register(fd, selectors.EVENT_READ)
        self._selector.register(self._server, selectors.EVENT_READ, self._server_news)
        self._watch_guardian()
        self._store.watch(self._keys.root, self._look)
        self._look()
        while not isinstance(self._agent.phase, Exited):
            event = self._inbox.take()
            if event is None:
                self._wait()
                continue
            self._agent, actions = step(self._agent, event, time.monotonic())
            for action in actions:
                self._act(action)
        self._server.stop()
        self._inbox.release()
        return self._agent.phase.outcome

    def _wait(self) -> None:
        due_s = deadline_s(self._agent)
        wanted_s = [at_s for at_s in (due_s, self._answer_due_s, self._patience_until_s) if at_s is not None]
        timeout_s = max(0.0, min(wanted_s) - time.monotonic()) if wanted_s else None
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.data:
                key.data()
        now_s = time.monotonic()
        if self._patience_until_s is not None and now_s >= self._patience_until_s:
            self._patience_until_s = None
            self._pump.say(f"importing {', '.join(self._preload or ())} once for all workers …")
        if due_s is not None and now_s >= due_s:
            self._inbox.post(Tick())
        if self._answer_due_s is not None and now_s >= self._answer_due_s and not ready:
            self._replace_server(self._group_now.generation, "did not answer when a worker was gone")

    def _look(self) -> None:
        self._inbox.post(Looked(read_snapshot(self._keys, self._store.read(self._keys.root))))

    def _act(self, action: Action) -> None:
        match action:
            case Commit(txn):
                self._store.commit(txn)
            case Join(generation):
                self._join(generation)
            case Spawn(table, group_rank):
                self._spawn(table, group_rank)
            case SignalWorkers(generation, local_ranks, signum):
                stage = "killing" if signum == signal.SIGKILL else "stopping"
                self._timeline.stamp(generation, stage, signal=signal_name(-signum), workers=len(local_ranks))
                if self._is_ending and not self._server_ready:
                    self._abandon_import(generation)
                else:
                    self._signal(local_ranks, signum)
            case Clear(generation):
                self._clear(generation)
            case ReplaceForkServer(generation):
                self._replace_server(generation, "did not answer")
            case Say(text):
                self._pump.say(text)
            case Exit(outcome):
                self._timeline.stamp(outcome.generation, "ended", outcome=outcome.kind.value, code=outcome.exit_code)

    def _join(self, generation: int) -> None:
        self._listener = self._listener or reserve(self._config)
        joined = Joined(self._agent.me.node_id, self._listener.getsockname()[1])
        self._store.commit(join(self._agent.snapshot, joined))

    def _spawn(self, table: RankTable, group_rank: int) -> None:
        self._timeline.stamp(table.generation, "sealed", world_size=table.world_size)
        self._group = Group(table, group_rank, self._guard.cgroup.generation(table.generation))
        try:
            self._workers.start(self._server, self._group, self._listener)
        except (BrokenPipeError, ConnectionResetError):
            # The fork server is gone; its socket says so as well, and that is where it is handled.
            return
        except OSError as error:
            self._replace_server(table.generation, f"could not be given the workers: {error.strerror}")
            return
        finally:
            # The one port that was asked for stays ours: nobody can take it between two generations.
            if self._listener and not (len(self._config.master_ports) == 1 and self._workers.has_store):
                self._listener.close()
                self._listener = None
        self._timeline.stamp(table.generation, "ordered")
        for link in self._group.links.values():
            self._selector.register(link, selectors.EVENT_READ, self._link_reader(self._group, link))
        if self._group.store:
            self._selector.register(self._group.store, selectors.EVENT_READ, self._store_reader(self._group))

    def _replace_server(self, generation: int, how: str) -> None:
        self._selector.unregister(self._server)
        self._server.stop()
        self._renew_server(generation, how)

    def _signal(self, local_ranks: frozenset[int], signum: int) -> None:
        for local_rank in local_ranks:
            try:
                self._workers.signal(self._server, self._group_now, local_rank, signum)
            except OSError:
                return

    @property
    def _is_ending(self) -> bool:
        return isinstance(self._agent.phase, Stopping) and self._agent.phase.signum != 0

    def _abandon_import(self, generation: int) -> None:
        """End a fork server that still imports: no worker is there yet, so none has anything to save."""
        if self._server.fileno() < 0:
            return
        self._selector.unregister(self._server)
        self._server.stop()
        failure = self._blameless(FailureKind.TEMPLATE_LOST, generation, "the fork server was stopped")
        self._inbox.post(ServiceLost(generation, failure, workers_too=True))

    @property
    def _group_now(self) -> Group:
        assert self._group is not None
        return self._group

    def _link_reader(self, group: Group, link: Link) -> Callable[[], None]:
        def read() -> None:
            raised_before = link.raised
            if not link.read():
                self._drop(link)
                self._ask_server()
            if link.raised and not raised_before:
                self._inbox.post(WorkerRaised(group.generation, link.local_rank))

        return read

    def _store_reader(self, group: Group) -> Callable[[], None]:
        def read() -> None:
            # It has one word to say; that it ended is the fork server's news.
            store = group.store
            if store is not None:
                self._selector.unregister(store)
                if self._workers.hear_store(group, store):
                    self._timeline.stamp(group.generation, "store_ready")

        return read

    def _unwatch_store(self, group: Group) -> None:
        if group.store:
            with suppress(KeyError):
                self._selector.unregister(group.store)

    def _ask_server(self) -> None:
        """A link ended, as it does when its worker dies: is the fork server there to tell us of that?"""
        with suppress(OSError):
            self._server.ask()
            # It may have many workers to fork before it comes to answering.
            wait_s = KILL_WAIT_S + _FORK_S * self._config.slots
            self._answer_due_s = self._answer_due_s or time.monotonic() + wait_s

    def _drop(self, link: Link) -> None:
        if link.socket.fileno() >= 0:
            # A group that could not be started has links that nobody reads yet.
            with suppress(KeyError):
                self._selector.unregister(link)
            link.socket.close()

    def _clear(self, generation: int) -> None:
        self._timeline.stamp(generation, "stopped")
        group = self._group_now
        self._unwatch_store(group)
        self._workers.close_store(group)
        for link in group.links.values():
            self._drop(link)
        self._guard.end_generation(generation, self._server.pid)
        reached = group.reached_store

        def drained(tails: dict[int, str]) -> None:
            self._timeline.stamp(generation, "cleared")
            self._inbox.post(Cleared(generation, tails, reached))

        self._pump.drain(generation, drained)

    def _server_news(self) -> None:
        try:
            news = self._server.receive()
        except BlockingIOError:
            return
        if news is None:
            self._selector.unregister(self._server)
            how = self._server.lost()
            if not self._server_ready and self._preload is not None:
                self._pump.say("the fork server ended while it imported; each worker starts as a fresh interpreter")
                self._preload = None
            self._renew_server(self._group.generation if self._group else -1, how)
            return
        if self._answer_due_s is not None:
            self._answer_due_s = time.monotonic() + KILL_WAIT_S
        match news["event"]:
            case "ready":
                self._server_ready = True
                self._patience_until_s = None
                newest = self._group.generation if self._group else NO_GENERATION
                self._timeline.stamp(newest, "fork_server_ready", pid=self._server.pid)
                if news["reason"]:
                    self._preload = None
                    self._pump.say(f"each worker starts as a fresh interpreter, which is slower: {news['reason']}")
            case "here":
                self._answer_due_s = None
            case "forked" if self._group and news["generation"] == self._group.generation:
                self._stamp_process(self._group, "forked", news)
            case "unstarted" if self._group and news["generation"] == self._group.generation:
                self._unstarted(self._group, news["key"], news["why"])
            case "exited" if self._group and news["generation"] == self._group.generation:
                self._exited(self._group, news)

    def _stamp_process(self, group: Group, event: str, news: dict[str, int | str]) -> None:
        """A stage of one process: `event` of a worker, with its ranks, or `store_<event>`."""
        fields: dict[str, int | str] = {name: value for name, value in news.items() if name in ("pid", "code")}
        if news["key"] == "store":
            self._timeline.stamp(group.generation, f"store_{event}", **fields)
        else:
            local_rank = int(news["key"])
            self._timeline.stamp(group.generation, event, rank=group.rank(local_rank), local_rank=local_rank, **fields)

    def _exited(self, group: Group, news: dict[str, int | str]) -> None:
        self._stamp_process(group, "exited", news)
        pid, code = int(news["pid"]), int(news["code"])
        if news["key"] != "store":
            self._inbox.post(self._workers.exited(group, int(news["key"]), pid, code))
        elif group.store:
            self._unwatch_store(group)
            error = self._workers.store_error(group)
            how = error or (f"was killed by {signal_name(code)}" if code < 0 else f"exited with code {code}")
            failure = self._blameless(FailureKind.STORE_LOST, group.generation, f"the worker store {how}")
            self._inbox.post(ServiceLost(group.generation, failure, workers_too=False))

    def _unstarted(self, group: Group, key: int | str, why: str) -> None:
        """The fork server could not fork: no memory, or too many processes."""
        what = "the worker store" if key == "store" else f"the worker of local rank {key}"
        failure = self._blameless(FailureKind.SPAWN, group.generation, f"{what} could not be started ({why})")
        if key == "store":
            self._inbox.post(ServiceLost(group.generation, failure, workers_too=False))
        else:
            self._inbox.post(WorkerExited(group.generation, int(key), 1, failure))

    def _renew_server(self, generation: int, how: str) -> None:
        """Start another fork server for the next generation; the workers of this one died with theirs."""
        self._server_ready = False
        self._answer_due_s = None
        environment = self._guard.environment(self._config.environment)
        self._server = ForkServer(self._config.spec.program, self._preload, environment)
        self._selector.register(self._server, selectors.EVENT_READ, self._server_news)
        failure = self._blameless(FailureKind.TEMPLATE_LOST, generation, f"the fork server {how}")
        self._inbox.post(ServiceLost(generation, failure, workers_too=True))

    def _blameless(self, kind: FailureKind, generation: int, message: str) -> Failure:
        me = self._agent.me
        return Failure(kind, generation, me.node_id, me.host, -1, -1, -1, None, message, failed_at=time.time())

    def _watch_guardian(self) -> None:
        pidfd = os.pidfd_open(self._guard.pid)

        def gone() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            if self._guard.renewals == _GUARDIANS_MAX:
                self._pump.say("the guardian keeps ending; going on without one: kill -9 may leave processes behind")
                return
            self._pump.say("the guardian was killed; starting another")
            self._guard.renew()
            self._watch_guardian()

        self._selector.register(pidfd, selectors.EVENT_READ, gone)
