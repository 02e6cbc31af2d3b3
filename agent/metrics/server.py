"""Serves metrics over HTTP in a thread that only wakes for a request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from elaunch.agent.metrics.collector import NodeCollector, NodeState

# Scrapers are few, and ask at once. Others may be anybody who reaches the port: the oldest goes when another comes.
_REQUESTS_MAX = 8
_REQUEST_S_MAX = 10.0


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S_MAX

    def log_message(self, *_: Any) -> None:
        """The log is the job's."""


class _MetricsServer(ThreadingWSGIServer):
    """Answers on a socket that listens already, a few requests at a time."""

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
                # Its thread, which waits for it, ends.
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
        """A scraper that goes away is no news."""


def serve(listener: socket.socket, read: Callable[[], NodeState]) -> None:
    """Answer scrapes until this process ends."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(read))
    server = _MetricsServer(listener)
    server.set_app(make_wsgi_app(registry))
    # Without a poll interval it waits for requests alone.
    serve_forever: Any = server.serve_forever
    threading.Thread(target=serve_forever, args=(None,), name="elaunch-metrics", daemon=True).start()
