"""The fork servers of one agent, one after another: what they say becomes events, and a lost one is replaced."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from contextlib import suppress

from elaunch.agent.config import AgentConfig
from elaunch.agent.core.events import Event, ServiceLost, WorkerExited
from elaunch.agent.core.stopping import KILL_WAIT_S
from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.guardian.client import Guard
from elaunch.agent.output.timeline import NO_GENERATION, Timeline
from elaunch.agent.workers.group import Group
from elaunch.agent.workers.spawner import Workers, signal_name
from elaunch.rendezvous.types import Failure, FailureKind

_FORK_S = 0.05
# Imports that take longer than this are worth a word to whoever waits.
_PATIENCE_S = 4.0


class Servers:
    """Hears the fork server of the moment.

    `server` was started by the caller, before the heavier imports, with `guard.environment(config.environment)`.
    `post` takes events, `say` sentences for the log; `blameless` makes a failure that is no rank's.
    """

    def __init__(
        self,
        server: ForkServer,
        config: AgentConfig,
        guard: Guard,
        workers: Workers,
        timeline: Timeline,
        selector: selectors.BaseSelector,
        post: Callable[[Event], None],
        say: Callable[[str], None],
        blameless: Callable[[FailureKind, int, str], Failure],
    ) -> None:
        self.now = server
        self.is_ready = False
        # The generation that is in its hands.
        self.group: Group | None = None
        self._config = config
        self._guard = guard
        self._workers = workers
        self._timeline = timeline
        self._selector = selector
        self._post = post
        self._say = say
        self._blameless = blameless
        self._preload = config.preload
        self._answer_due_s: float | None = None
        self._patience_until_s = time.monotonic() + _PATIENCE_S if config.preload else None
        self._selector.register(server, selectors.EVENT_READ, self._hear)

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock."""
        timers_s = [at_s for at_s in (self._answer_due_s, self._patience_until_s) if at_s is not None]
        return min(timers_s, default=None)

    def tick(self, now_s: float, *, is_quiet: bool) -> None:
        """Say that an import takes long; replace a server that is silent, when nothing else is heard."""
        if self._patience_until_s is not None and now_s >= self._patience_until_s:
            self._patience_until_s = None
            self._say(f"importing {', '.join(self._preload or ())} once for all workers …")
        if self._answer_due_s is not None and now_s >= self._answer_due_s and is_quiet and self.group:
            self.replace(self.group.generation, "did not answer when a worker was gone")

    def ask(self) -> None:
        """A link ended, as it does when its worker dies: is the fork server there to tell us of that?"""
        with suppress(OSError):
            self.now.ask()
            # It may have many workers to fork before it comes to answering.
            wait_s = KILL_WAIT_S + _FORK_S * self._config.slots
            self._answer_due_s = self._answer_due_s or time.monotonic() + wait_s

    def replace(self, generation: int, how: str) -> None:
        """End the fork server and its workers, and start another."""
        self._selector.unregister(self.now)
        self.now.stop()
        self._renew(generation, how)

    def abandon_import(self, generation: int) -> None:
        """End a fork server that still imports: no worker is there yet, so none has anything to save."""
        if self.now.fileno() < 0:
            return
        self._selector.unregister(self.now)
        self.now.stop()
        failure = self._blameless(FailureKind.TEMPLATE_LOST, generation, "the fork server was stopped")
        self._post(ServiceLost(generation, failure, workers_too=True))

    def hear_store(self, group: Group) -> None:
        """Take the word of the worker store, which has one to say; that it ended is the fork server's news."""
        store = group.store
        if store is not None:
            self._selector.unregister(store)
            if self._workers.hear_store(group, store):
                self._timeline.stamp(group.generation, "store_ready")

    def unwatch_store(self, group: Group) -> None:
        if group.store:
            with suppress(KeyError):
                self._selector.unregister(group.store)

    def _hear(self) -> None:
        try:
            news = self.now.receive()
        except BlockingIOError:
            return
        if news is None:
            self._selector.unregister(self.now)
            how = self.now.lost()
            if not self.is_ready and self._preload is not None:
                self._say("the fork server ended while it imported; each worker starts as a fresh interpreter")
                self._preload = None
            self._renew(self.group.generation if self.group else NO_GENERATION, how)
            return
        if self._answer_due_s is not None:
            self._answer_due_s = time.monotonic() + KILL_WAIT_S
        group = self.group if self.group and news.get("generation") == self.group.generation else None
        match news["event"]:
            case "ready":
                self._ready(news["reason"])
            case "here":
                self._answer_due_s = None
            case "forked" if group:
                self._stamp_process(group, "forked", news)
                if news["key"] != "store":
                    group.pids[int(news["key"])] = int(news["pid"])
            case "unstarted" if group:
                self._unstarted(group, news["key"], news["why"])
            case "exited" if group:
                self._exited(group, news)

    def _ready(self, reason: str) -> None:
        self.is_ready = True
        self._patience_until_s = None
        newest = self.group.generation if self.group else NO_GENERATION
        self._timeline.stamp(newest, "fork_server_ready", pid=self.now.pid)
        if reason:
            self._preload = None
            self._say(f"each worker starts as a fresh interpreter, which is slower: {reason}")

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
            self._post(self._workers.exited(group, int(news["key"]), pid, code))
        elif group.store:
            self.unwatch_store(group)
            error = self._workers.store_error(group)
            how = error or (f"was killed by {signal_name(code)}" if code < 0 else f"exited with code {code}")
            failure = self._blameless(FailureKind.STORE_LOST, group.generation, f"the worker store {how}")
            self._post(ServiceLost(group.generation, failure, workers_too=False))

    def _unstarted(self, group: Group, key: int | str, why: str) -> None:
        """The fork server could not fork: no memory, or too many processes."""
        what = "the worker store" if key == "store" else f"the worker of local rank {key}"
        failure = self._blameless(FailureKind.SPAWN, group.generation, f"{what} could not be started ({why})")
        if key == "store":
            self._post(ServiceLost(group.generation, failure, workers_too=False))
        else:
            self._post(WorkerExited(group.generation, int(key), 1, failure))

    def _renew(self, generation: int, how: str) -> None:
        """Start another fork server for the next generation; the workers of this one died with theirs."""
        self.is_ready = False
        self._answer_due_s = None
        environment = self._guard.environment(self._config.environment)
        self.now = ForkServer(self._config.spec.program, self._preload, environment, self._config.ignored)
        self._selector.register(self.now, selectors.EVENT_READ, self._hear)
        failure = self._blameless(FailureKind.TEMPLATE_LOST, generation, f"the fork server {how}")
        self._post(ServiceLost(generation, failure, workers_too=True))
