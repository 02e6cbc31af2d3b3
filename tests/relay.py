"""A TCP relay between a client and a server that tests can cut, and servers that misbehave."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

from elaunch.rendezvous.endpoint import Endpoint
from tests.harness import joined

Listening = TypeVar("Listening", bound="Listener")


class Listener:
    """A server on a free port of loopback that calls `serve` for every connection, each in a thread of its own.

    While it is `shut`, it ends new connections at once.
    """

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._socket.getsockname()[1])
        self.accepted = 0
        self.shut = False
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self: Listening) -> Listening:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.hang_up()
        for thread in self._threads:
            thread.join(60)
        self._socket.close()

    def hang_up(self) -> None:
        """End all connections."""
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End all connections, and let no client in until `restore`."""
        self.shut = True
        self.hang_up()

    def restore(self) -> None:
        self.shut = False

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self.accepted += 1
            self._open.append(client)
            thread = threading.Thread(target=self._run, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            if not self.shut:
                self._serve(client)


def relay(target: Endpoint) -> Listener:
    """A listener that passes all data on to `target`, in both directions."""

    def serve(client: socket.socket) -> None:
        with socket.create_connection((target.host, target.port)) as server:
            back = threading.Thread(target=copy, args=(server, client), daemon=True)
            back.start()
            copy(client, server)
            back.join(60)

    return Listener(serve)


def silent() -> Listener:
    """A listener that reads everything and never answers."""

    def serve(client: socket.socket) -> None:
        while client.recv(65536):
            pass

    return Listener(serve)


@contextmanager
def web_server(status: int, version: bytes, *, posts: bool = False) -> Iterator[Endpoint]:
    """Answers GET with `version`, and knows no other request; or answers all so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(status, version)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(*((status, version) if posts else (404, b"404 page not found")))

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Endpoint("127.0.0.1", server.server_port)
        finally:
            server.shutdown()
            joined(thread)


def copy(source: socket.socket, target: socket.socket) -> None:
    """Pass all data on until the source ends."""
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
