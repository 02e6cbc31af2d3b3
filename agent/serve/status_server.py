"""Answers queries about this node and orders to the job: on a socket for this host, and over the job's store.

A connection carries one line of JSON each way, then it closes. The agent's loop reads it, so nothing wakes up while
no client connects. The socket is in a folder that only its user can enter, and that the guardian removes.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from elaunch.agent.core.events import Event
from elaunch.agent.core.membership import order
from elaunch.agent.core.state import Agent
from elaunch.agent.core.timeline import WorkersSeen, node_report
from elaunch.agent.diagnosis.stack_groups import stack_response
from elaunch.agent.diagnosis.stacks import take
from elaunch.agent.linux import credentials, start_thread
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.queries import RESPONSE_BYTES_MAX, RESPONSES_PER_S, Query, Topic, post_response
from elaunch.rendezvous.rules.reports import NodeReport, job_report
from elaunch.rendezvous.store import Txn
from elaunch.strict_json import parse_json

VERSION = 1
SOCKET_NAME = "agent"
# py-spy has this long for all workers of the node.
STACKS_S = 5.0
# Responses to this host's processes: in a burst, and per second.
LOCAL_BURST = 20
LOCAL_PER_S = 10.0
# A node responds to the store's queries no more often than this, however small the job is.
STORE_PAUSE_S = 0.5
_REQUEST_BYTES_MAX = 4096
# Connections without a request so far. The oldest is closed when another one comes.
_WAITING_MAX = 8
# Connections that the kernel holds while the loop is busy.
_BACKLOG = 64
# A client that does not read its response is dropped after this long.
_READ_S = 5.0
_LIVE = ("running", "stopped")
# Sends the response, and returns whether the client is connected.
Reply = Callable[[str], bool]


@dataclass(frozen=True)
class Allowance:
    """A token bucket: at `at_s`, `left` responses could be sent."""

    left: float = LOCAL_BURST
    at_s: float = 0.0

    def take(self, now_s: float) -> tuple[Allowance, bool]:
        """The allowance after one more query, and whether that gets a response."""
        left = min(LOCAL_BURST, self.left + max(0.0, now_s - self.at_s) * LOCAL_PER_S)
        return Allowance(max(0.0, left - 1), now_s) if left >= 1 else Allowance(left, now_s), left >= 1


@dataclass(frozen=True)
class QueryQueue:
    """The store's query that waits for this node's response, until `due_s`; only the newest one waits.

    `seen` identifies the last query, `answered_s` is when the last one was taken up.
    """

    waiting: Query | None = None
    due_s: float | None = None
    seen: str = ""
    answered_s: float = float("-inf")

    def after(self, query: Query | None, now_s: float, seats: int, share: float) -> QueryQueue:
        """The queue with the store's `query`. `share` (0 to 1) is this node's place among the job's `seats`."""
        if query is None:
            return self if self.waiting is None else replace(self, waiting=None, due_s=None)
        if query.identity == self.seen:
            return self
        # All nodes receive it at the same time. They respond one after the other, and none of them too often.
        round_s = max(seats, 1) / RESPONSES_PER_S
        due_s = max(now_s + share * round_s, self.answered_s + max(STORE_PAUSE_S, round_s))
        return replace(self, waiting=query, due_s=due_s, seen=query.identity)

    def postponed(self, query: Query, now_s: float) -> QueryQueue:
        """The same query a little later, unless a newer one waits."""
        return self if self.waiting else replace(self, waiting=query, due_s=now_s + STORE_PAUSE_S)

    def take_due(self, now_s: float) -> tuple[QueryQueue, Query | None]:
        """The query that is due now, if any."""
        if self.waiting is None or self.due_s is None or now_s < self.due_s:
            return self, None
        return replace(self, waiting=None, due_s=None, answered_s=now_s), self.waiting


def _reply(connection: socket.socket, text: str) -> bool:
    """Send one line and close; return whether the client is connected. Any thread may call it, once.

    A thread sends what the socket does not take immediately.
    """
    data = text.encode() + b"\n"

    def send_rest() -> None:
        with connection, suppress(OSError):
            connection.settimeout(_READ_S)
            connection.sendall(data[sent:])

    try:
        sent = connection.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        connection.close()
        return False
    if sent == len(data) or not start_thread(send_rest, "elaunch-reply"):
        connection.close()
    return True


class LocalSocket:
    """The listening socket, in the first of `folders` that takes one. `path` is None where none does.

    The loop calls `handle(topic, reply)` for each request.
    """

    def __init__(
        self, folders: Iterable[Path], selector: selectors.BaseSelector, handle: Callable[[str, Reply], None]
    ) -> None:
        self._selector = selector
        self._handle = handle
        self._listener: socket.socket | None = None
        self._waiting: list[socket.socket] = []
        self.path: Path | None = None
        for folder in folders:
            if self._listen(folder / SOCKET_NAME):
                break
            _remove(folder)

    def close(self) -> None:
        """Close all connections, and remove the folder."""
        for connection in [*self._waiting]:
            self._forget(connection).close()
        if self._listener:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        if self.path:
            _remove(self.path.parent)

    def _listen(self, path: Path) -> bool:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # A path may be too long for a socket's address, and some file systems have no sockets.
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            return False
        self._listener, self.path = listener, path
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        return True

    def _accept(self) -> None:
        assert self._listener
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptor is left. An open socket would wake the loop for ever.
            self.close()
            return
        if credentials(connection)[1] not in (os.geteuid(), 0):
            connection.close()
            return
        if len(self._waiting) >= _WAITING_MAX:
            self._forget(self._waiting[0]).close()
        connection.setblocking(False)
        self._waiting.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._waiting:
            return
        try:
            data = connection.recv(_REQUEST_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._forget(connection)
        # Clients send a line in one write.
        topic = _topic(data) if data.endswith(b"\n") else None
        if topic is None:
            connection.close()
        else:
            self._handle(topic, partial(_reply, connection))

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        self._waiting.remove(connection)
        return connection


def _topic(line: bytes) -> str | None:
    with suppress(ValueError):
        match parse_json(line):
            case {"ask": str(topic)}:
                return topic
    return None


def _remove(folder: Path) -> None:
    # The claim on the folder is a file in it, which the agent's guardian removes if this does not.
    with suppress(OSError):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@dataclass(eq=False)
class StatusServer:
    """This node's responses. The agent's loop calls all methods.

    `agent` returns the agent's state, `seen` that of its workers. `offer` makes a best-effort write to the store, and
    calls back, in any thread, if the guards held. `locator` is JSON by which another process of this user reaches the
    store, empty where the store is in this process. `begun_s` is when the agent began, on the monotonic clock. `post`
    takes the event of a person's order.
    """

    agent: Callable[[], Agent]
    seen: Callable[[float], WorkersSeen | None]
    offer: Callable[[Txn, Callable[[], object] | None], None]
    locator: str
    begun_s: float
    post: Callable[[Event], object]
    _allowance: Allowance = field(default_factory=lambda: Allowance(at_s=time.monotonic()))
    _queue: QueryQueue = QueryQueue()
    _is_idle: threading.Lock = field(default_factory=threading.Lock)

    @property
    def due_s(self) -> float | None:
        """When `tick` is due, on the monotonic clock; None while no query waits."""
        return self._queue.due_s

    def note(self, query: Query | None) -> None:
        """Receive the query in the store's key, None if there is none."""
        if query is None and self._queue.waiting is None:
            return
        agent = self.agent()
        table = agent.snapshot.table
        # Equal for each query, and different from node to node.
        share = zlib.crc32(agent.me.node_id.encode()) / (1 << 32)
        self._queue = self._queue.after(query, time.monotonic(), len(table.seats) if table else 1, share)

    def tick(self, now_s: float) -> None:
        """Answer the store's query, if it is time."""
        self._queue, query = self._queue.take_due(now_s)
        agent = self.agent()
        if query is None or query.lease in (agent.membership.lease, agent.snapshot.lease):
            return
        respond = partial(post_response, agent.snapshot.keys, query, agent.me.node_id)
        if query.topic.is_order:
            if agent.leads:
                event, response = order(agent, query.topic)
                # The response is written only while the client waits for it, and the store may go with the job.
                self.offer(respond(encode(response)), lambda: event and self.post(event))
        elif query.topic is Topic.STATUS:
            text = self._status(now_s)
            if len(text) <= RESPONSE_BYTES_MAX:
                self.offer(respond(text), None)
        elif not self._take_stacks(lambda text: self.offer(respond(text), None)):
            self._queue = self._queue.postponed(query, now_s)

    def handle(self, topic: str, reply: Reply) -> None:
        """Answer a process of this host."""
        now_s = time.monotonic()
        self._allowance, is_allowed = self._allowance.take(now_s)
        if not is_allowed:
            reply(_refusal("it has too many queries; try again in a second"))
            return
        match topic:
            case "status":
                job = encode(job_report(self.agent().snapshot))
                is_remote = "true" if self.locator else "false"
                status = self._status(now_s)
                reply(f'{{"version":{VERSION},"is_remote":{is_remote},"job":{job},"node":{status}}}')
            case "stacks":
                if not self._take_stacks(lambda text: reply(f'{{"version":{VERSION},"stacks":{text}}}')):
                    reply(_refusal("it takes the stacks for another query; try again in a second"))
            case Topic.STOP.value | Topic.RESTART.value:
                event, response = order(self.agent(), Topic(topic))
                # A client that has disconnected got no response, and may have acted otherwise.
                if reply(f'{{"version":{VERSION},"order":{encode(response)}}}') and event:
                    self.post(event)
            case "store" if self.locator:
                reply(f'{{"version":{VERSION},"store":{self.locator}}}')
            case _:
                reply(_refusal(f"it has no query {topic[:40]!r}"))

    def _status(self, now_s: float) -> str:
        report = node_report(self.agent(), os.getpid(), now_s - self.begun_s, self.seen(now_s))
        return encode(with_usage(report))

    def _take_stacks(self, use: Callable[[str], object]) -> bool:
        """Have a thread take the workers' stacks and `use` them as JSON. Returns False if that cannot start now."""
        if not self._is_idle.acquire(blocking=False):
            return False
        report = node_report(self.agent(), os.getpid(), 0.0, self.seen(time.monotonic()))
        pids = {rank.rank: rank.pid for rank in report.ranks if rank.state in _LIVE and rank.pid > 0}

        def work() -> None:
            try:
                use(stack_response(report.node_id, report.generation, take(pids, within_s=STACKS_S)))
            finally:
                self._is_idle.release()

        if start_thread(work, "elaunch-stacks"):
            return True
        self._is_idle.release()
        return False


def _refusal(why: str) -> str:
    return json.dumps({"version": VERSION, "error": why})


def with_usage(report: NodeReport) -> NodeReport:
    """The report with the memory of its ranks, and with the memory, CPUs and load of this host."""
    host = psutil.virtual_memory()
    return replace(
        report,
        ranks=tuple(replace(rank, memory_bytes=_memory_of(rank.pid)) for rank in report.ranks),
        memory_bytes=host.total,
        memory_free_bytes=host.available,
        cpus=os.cpu_count(),
        load=os.getloadavg()[0],
    )


def _memory_of(pid: int) -> int | None:
    """The resident memory of that process; None if it has exited."""
    with suppress(psutil.Error, ValueError):
        return int(psutil.Process(pid).memory_info().rss)
    return None
