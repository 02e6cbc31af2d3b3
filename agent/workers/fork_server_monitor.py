"""Turns what the fork server says into events, and replaces a fork server that is lost or silent."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from elaunch.agent import linux
from elaunch.agent.core.events import ServiceLost, Signalled, WorkerExited
from elaunch.agent.diagnosis.causes.hardware import MORE_MEMORY
from elaunch.agent.diagnosis.causes.system import MORE_PROCESSES
from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.workers.exits import ExitReader, signal_name
from elaunch.agent.workers.group import CurrentGroup, Reporter, WorkerGroup
from elaunch.rendezvous.types import FailureKind

# An import that takes longer than this is worth a line in the log: the user waits for it.
_PATIENCE_S = 10.0
# Nothing tells who has sent a SIGKILL.
_KILLED_PARENT = (
    "the fork server is the parent process of this node's ranks: a script that ends the job by killing its parent"
    " (os.kill(os.getppid(), SIGKILL)) should send SIGTERM, or exit with a code of its own; else look for who may have"
    " sent it SIGKILL"
)


class ForkServerMonitor:
    """Reads what `server` says of the current generation's processes. Only the agent's loop calls it."""

    def __init__(
        self,
        server: ForkServer,
        current: CurrentGroup,
        exits: ExitReader,
        reporter: Reporter,
        selector: selectors.BaseSelector,
    ) -> None:
        self.is_ready = False
        self._server = server
        self._current = current
        self._exits = exits
        self._reporter = reporter
        self._timeline = reporter.timeline
        self._selector = selector
        self._patience_until_s = time.monotonic() + _PATIENCE_S if server.preload else None
        self._selector.register(server, selectors.EVENT_READ, self._read)

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock."""
        return self._patience_until_s

    def tick(self, now_s: float) -> None:
        """Say that an import takes long."""
        if self._patience_until_s is not None and now_s >= self._patience_until_s:
            self._patience_until_s = None
            self._reporter.say(f"importing {', '.join(self._server.preload or ())} once for all workers …")

    def check(self) -> None:
        """A link has ended, as at a worker's death, which a fork server that was stopped (SIGSTOP) does not report."""
        if self._server.fileno() >= 0 and linux.state(self._server.pid) == "T":
            self.replace(self._current.generation, "was stopped by a signal when a worker was gone")

    def replace(self, generation: int, how: str) -> None:
        """End the fork server and its workers, and start another."""
        self._selector.unregister(self._server)
        self._server.stop()
        self._restart(generation, how)

    def abandon_import(self, generation: int) -> None:
        """End a fork server that still imports: no worker is there yet, so none has anything to save."""
        if self._server.fileno() < 0:
            return
        self._selector.unregister(self._server)
        self._server.stop()
        self._lost(generation, "the fork server was stopped", FailureKind.TEMPLATE_LOST)

    def _read(self) -> None:
        try:
            news = self._server.receive()
        except BlockingIOError:
            return
        if news is None:
            self._selector.unregister(self._server)
            how, pid = self._server.lost(), self._server.pid
            word = self._exits.word_of_kernel(pid) if how.endswith("SIGKILL") else ""
            if not self.is_ready and self._server.preload is not None:
                self._reporter.warn(
                    "the fork server ended while it imported; each worker starts as a fresh interpreter"
                )
                self._server.preload_nothing()
            self._restart(self._current.generation, how, word)
            return
        group = self._current.of(news.get("generation"))
        match news["event"]:
            case "ready":
                self._ready(news["reason"], news["left_out"])
            case "forked" if group:
                self._stamp_process(group, "forked", news)
                if news["key"] != "store":
                    local_rank = int(news["key"])
                    group.pids[local_rank], group.forked_s[local_rank] = int(news["pid"]), time.monotonic()
            case "asked" if group and isinstance(news["key"], int):
                name = signal.Signals(news["signum"]).name
                by = f"{name} from rank {group.rank(news['key'])} to its parent process"
                # As to a launcher, which ends the job then.
                self._reporter.post(Signalled(signal.SIGINT, by, is_order=True))
            case "unstarted" if group:
                self._unstarted(group, news["key"], news["why"])
            case "exited" if group:
                self._exited(group, news)

    def _ready(self, reason: str, left_out: Sequence[str]) -> None:
        self.is_ready = True
        self._patience_until_s = None
        self._timeline.stamp(self._current.generation, "fork_server_ready", pid=self._server.pid)
        for sentence in left_out:
            self._reporter.say(sentence)
        if reason:
            self._server.preload_nothing()
            self._reporter.warn(f"each worker starts as a fresh interpreter, which is slower: {reason}")

    def _stamp_process(self, group: WorkerGroup, event: str, news: dict[str, int | str]) -> None:
        """Stamp a stage of one process: `event` with the ranks of a worker, or `store_<event>`."""
        fields: dict[str, int | str] = {name: value for name, value in news.items() if name in ("pid", "code")}
        if news["key"] == "store":
            self._timeline.stamp(group.generation, f"store_{event}", **fields)
        else:
            local_rank = int(news["key"])
            self._timeline.stamp(group.generation, event, rank=group.rank(local_rank), local_rank=local_rank, **fields)

    def _exited(self, group: WorkerGroup, news: dict[str, int | str]) -> None:
        self._stamp_process(group, "exited", news)
        pid, code = int(news["pid"]), int(news["code"])
        if news["key"] != "store":
            self._reporter.post(self._exits.exited(group, int(news["key"]), pid, code))
        elif group.store:
            error, group.store = group.store.last_error(), None
            how = error or (f"was killed by {signal_name(code)}" if code < 0 else f"exited with code {code}")
            word = self._exits.word_of_kernel(pid) if code == -signal.SIGKILL else ""
            self._lost(group.generation, f"the worker store {how}", FailureKind.STORE_LOST, word)

    def _unstarted(self, group: WorkerGroup, key: int | str, why: str) -> None:
        """The fork server could not fork: no memory, or too many processes."""
        what = "the worker store" if key == "store" else f"the worker of local rank {key}"
        message = f"{what} could not be started ({why})"
        failure = self._reporter.node_failure(FailureKind.SPAWN, group.generation, message)
        if why == os.strerror(errno.EAGAIN):
            failure = replace(failure, advice=MORE_PROCESSES)
        if key == "store":
            self._reporter.post(ServiceLost(group.generation, failure, workers_too=False))
        else:
            self._reporter.post(WorkerExited(group.generation, int(key), 1, failure))

    def _restart(self, generation: int, how: str, word: str = "") -> None:
        """Start another fork server for the next generation; the workers of this one died with theirs."""
        self.is_ready = False
        self._server.restart()
        self._selector.register(self._server, selectors.EVENT_READ, self._read)
        self._lost(generation, f"the fork server {how}", FailureKind.TEMPLATE_LOST, word)

    def _lost(self, generation: int, message: str, kind: FailureKind, word: str = "") -> None:
        """Post that the fork server and all workers are gone (TEMPLATE_LOST), or the worker store (other kinds).

        `word` is the kernel's, if it killed the process for lack of memory.
        """
        failure = self._reporter.node_failure(kind, generation, f"{message} ({word})" if word else message)
        if word:
            failure = replace(failure, advice=MORE_MEMORY.format(limit=""))
        elif kind is FailureKind.TEMPLATE_LOST and message.endswith(signal.SIGKILL.name):
            failure = replace(failure, advice=_KILLED_PARENT)
            # Before that it was nobody's parent.
            if (group := self._current.of(generation)) and group.pids:
                failure = self._exits.parent_killed(group, failure)
        self._reporter.post(ServiceLost(generation, failure, workers_too=kind is FailureKind.TEMPLATE_LOST))
