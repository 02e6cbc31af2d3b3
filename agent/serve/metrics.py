"""Prometheus metrics of one node (`--metrics-port`): counts events of its timeline, and serves them over HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from elaunch import __version__
from elaunch.agent.core.state import Agent, Finished, Running, Stopping

Family = CounterMetricFamily | GaugeMetricFamily
# Scrapers are few, and send their request immediately. Any other process may reach the port, too: the oldest connection
# is closed when another one comes.
_REQUESTS_MAX = 8
_REQUEST_S_MAX = 10.0
# The uses of this node's time.
TIME_USES = ("productive", "starting", "stopping", "waiting")


class RunCounters:
    """Counts events of one agent's timeline; one thread counts, any may read. `now_s` is of the monotonic clock.

    `last_failure` is the last one's wall clock (s) and kind, None without one.

    Time is productive while workers run. Once a program has reported a step, the time before the first step of each
    later generation counts as starting.
    """

    def __init__(self, now_s: float) -> None:
        self._lock = threading.Lock()
        self._use, self._since_s = "waiting", now_s
        self._seconds = dict.fromkeys(TIME_USES, 0.0)
        self.failures: Counter[str] = Counter()
        self.hangs = 0
        self.steps_repeated = 0
        self.last_failure: tuple[float, str] | None = None
        self._newest_step = -1

    def count(self, event: str, fields: Mapping[str, Any], now_s: float) -> None:
        """Count an event; fields as on the timeline."""
        with self._lock:
            match event:
                case "sealed":
                    self._turn("starting", now_s)
                case "forked" if self._newest_step < 0:
                    self._turn("productive", now_s)
                case "progress":
                    self._progress(fields, now_s)
                case "failed" | "stopping" | "killing" | "stopped":
                    self._turn("stopping", now_s)
                case "cleared":
                    self._turn("waiting", now_s)
                case "cause":
                    kind = str(fields["kind"])
                    self.failures[kind] += 1
                    self.last_failure = (float(fields["failed_at"]), kind)
                case "seems_hung":
                    self.hangs += 1

    def seconds(self, now_s: float) -> dict[str, float]:
        """The seconds until now, by use."""
        with self._lock:
            return {**self._seconds, self._use: self._seconds[self._use] + now_s - self._since_s}

    def _turn(self, use: str, now_s: float) -> None:
        self._seconds[self._use] += now_s - self._since_s
        self._use, self._since_s = use, now_s

    def _progress(self, fields: Mapping[str, Any], now_s: float) -> None:
        if self._use == "starting":
            self._turn("productive", now_s)
        first = [step for step in fields.get("first_steps", ()) if step >= 0]
        if first:
            self.steps_repeated += max(0, self._newest_step - min(first) + 1)
        self._newest_step = max(fields["steps"])


@dataclass(frozen=True)
class NodeState:
    """The data of one scrape. `steps` are the newest steps by rank; `started_at` is the wall clock (s)."""

    agent: Agent
    counters: RunCounters
    steps: Mapping[int, int]
    steps_per_s: float
    started_at: float


class NodeCollector(Collector):
    """The metrics of a node, from `read()`, which any thread may call. Each has the labels `run_id` and `node`."""

    def __init__(self, read: Callable[[], NodeState]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        state = self._read()
        agent, counts, snapshot = state.agent, state.counters, state.agent.snapshot
        own = [agent.spec.run_id, agent.me.host]

        def made(
            kind: type[Family], name: str, help: str, values: float | Mapping[str, float], label: str = ""
        ) -> Family:
            """One metric; with a `label`, `values` is keyed by it."""
            by_label = values if isinstance(values, Mapping) else {"": values}
            family = kind(name, help, labels=["run_id", "node", label] if label else ["run_id", "node"])
            for of, value in by_label.items():
                family.add_metric([*own, of] if label else own, value)
            return family

        gauge, counter = partial(made, GaugeMetricFamily), partial(made, CounterMetricFamily)
        table = snapshot.current_table
        size, nodes = (table.world_size, len(table.seats)) if table else (0, 0)
        live = dict.fromkeys(("running", "stopping", "finished"), 0.0)
        match agent.phase:
            case Running(live=ranks):
                live["running"] = len(ranks)
            case Stopping(live=ranks):
                live["stopping"] = len(ranks)
            case Finished():
                live["finished"] = agent.me.slots
        newest = snapshot.generation.number if snapshot.generation else -1
        is_reachable = agent.reach.failing_since_s is None
        restarts = snapshot.table.restarts if snapshot.table else 0
        steps = {str(rank): float(step) for rank, step in state.steps.items()}
        speed = "Steps per second of this node's workers, over the last ten seconds or more."

        yield gauge("elaunch_build_info", "Always 1; the version of elaunch is a label.", {__version__: 1}, "version")
        yield gauge("elaunch_start_time_seconds", "When elaunch began on this node (Unix time).", state.started_at)
        yield gauge("elaunch_generation", "The newest generation that this node has read, -1 before.", newest)
        yield gauge("elaunch_world_size", "Workers of all nodes in the newest generation; 0 while it forms.", size)
        yield gauge("elaunch_nodes", "Nodes in the newest generation; 0 while it forms.", nodes)
        yield counter("elaunch_restarts", "Restarts of the job that count towards --max-restarts.", restarts)
        yield gauge("elaunch_restarts_max", "The budget of restarts (--max-restarts).", agent.spec.max_restarts)
        yield gauge("elaunch_leader", "1 if this node leads the job.", agent.leads)
        yield gauge("elaunch_store_reachable", "1 if the job's store responds to this node's requests.", is_reachable)
        yield gauge("elaunch_node_up", "1 while workers of this node run.", live["running"] > 0)
        yield gauge("elaunch_workers", "Workers of this node, by state.", live, "state")
        yield gauge("elaunch_step", "The newest step that each rank of this node reported.", steps, "rank")
        yield gauge("elaunch_steps_per_second", speed, state.steps_per_s)
        yield counter(
            "elaunch_failures", "Generations that failed due to this node's workers.", counts.failures.copy(), "kind"
        )
        if counts.last_failure:
            at, kind = counts.last_failure
            when = "When this node's workers failed last (Unix time)."
            yield gauge("elaunch_last_failure_timestamp_seconds", when, {kind: at}, "kind")
        yield counter("elaunch_hangs", "Hangs of this node's workers, or of the whole job.", counts.hangs)
        yield counter("elaunch_steps_repeated", "Steps that were trained again after a restart.", counts.steps_repeated)
        seconds = counts.seconds(time.monotonic())
        yield counter("elaunch_time_seconds", "This node's time, by what it was used for.", seconds, "use")


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S_MAX

    def log_message(self, *_: Any) -> None:
        """Do not log scrapes."""


class _MetricsServer(ThreadingWSGIServer):
    """Serves a socket that listens already, a few requests at a time."""

    def __init__(self, listener: socket.socket) -> None:
        WSGIServer.__init__(self, ("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = listener.getsockname()[:2]
        self.setup_environ()
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= _REQUESTS_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                # Its thread, which waits for it, exits.
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore scrapers that disconnect."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at `host` and `port`; 0 is any free one. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family)


def url(listener: socket.socket) -> str:
    """The metrics' URL."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"


def serve(listener: socket.socket, read: Callable[[], NodeState]) -> None:
    """Serve scrapes until this process exits, in a thread that only wakes for a request."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(read))
    server = _MetricsServer(listener)
    server.set_app(make_wsgi_app(registry))
    # Without a poll interval it waits for requests alone.
    serve_forever: Any = server.serve_forever
    threading.Thread(target=serve_forever, args=(None,), name="elaunch-metrics", daemon=True).start()
