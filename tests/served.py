"""The served store for tests: in a thread of this process, or in a process of its own as an agent starts it."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.server.admission import CONNECTIONS_MAX
from elaunch.rendezvous.server.server import Server
from tests.harness import DEADLINE_S, joined

TOKEN = "a token for tests only"
SECRET = Secret(TOKEN)


def bound_socket(host: str = "127.0.0.1") -> socket.socket:
    """A socket on a free port."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.bind((host, 0))
    return bound


@contextmanager
def thread_serving(secret: Secret = SECRET, slots: int = CONNECTIONS_MAX) -> Iterator[tuple[Server, int]]:
    """Run a server in a thread. Yields it and its port on 127.0.0.1."""
    listener = bound_socket()
    port = listener.getsockname()[1]
    server = Server(listener, secret, slots)
    with running(server):
        yield server, port


@contextmanager
def running(server: Server) -> Iterator[None]:
    """Run the server in a thread."""
    end, other_end = socket.socketpair()
    server.stop_at_end_of(end.fileno())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield
    finally:
        other_end.close()
        joined(thread)
        end.close()


class ServerProcess:
    """`python -m elaunch.rendezvous.server`, as the head's agent starts it; use it as a context manager."""

    def __init__(
        self,
        token: str = TOKEN,
        host: str = "127.0.0.1",
        open_files: int | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        """`open_files` is its limit of descriptors, soft and hard."""
        self.token = token
        limit = ["prlimit", f"--nofile={open_files}"] if open_files else []
        with bound_socket(host) as listener:
            self.host, self.port = listener.getsockname()[:2]
            self.process = subprocess.Popen(
                [*limit, sys.executable, "-m", "elaunch.rendezvous.server", "--fd", str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=[listener.fileno()],
            )
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{token}\n".encode())
        self.process.stdin.flush()
        self.ready_line = self.process.stdout.readline()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()


class Gateway:
    """A client that sends any request and returns the answer as it is."""

    def __init__(self, host: str, port: int, secret: Secret = SECRET) -> None:
        self._address = (host, port)
        self._tls = secret.client_context()
        self.headers = {"Authorization": f"Bearer {secret.bearer}"}
        self._calls = self._connection()

    def call(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        """The status and the answer: its JSON, or its text if it is not JSON."""
        data = body if isinstance(body, (str, bytes)) else json.dumps({} if body is None else body)
        self._calls.request(method, path, data, self.headers)
        response = self._calls.getresponse()
        text = response.read().decode()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def put(self, key: bytes, value: bytes = b"", lease: int = 0) -> tuple[int, Any]:
        put = {"key": b64encode(key).decode(), "value": b64encode(value).decode(), "lease": str(lease)}
        return self.call("/v3/kv/txn", {"success": [{"request_put": put}]})

    def watch(self, create: dict[str, Any]) -> WatchStream:
        return WatchStream(self._connection(), create, self.headers)

    def close(self) -> None:
        self._calls.close()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPSConnection(*self._address, context=self._tls, timeout=180)


class WatchStream:
    """A watch: the results that it tells, one by one."""

    def __init__(self, connection: http.client.HTTPConnection, create: dict[str, Any], headers: dict[str, str]) -> None:
        self._connection = connection
        connection.request("POST", "/v3/watch", json.dumps({"create_request": create}), headers)
        self._response = connection.getresponse()
        self.status = self._response.status
        self.created = self.next() if self.status == 200 else {}

    def next(self) -> dict[str, Any]:
        """The next result, an empty one at the end of the stream. Waits for it."""
        while (line := self._response.readline()) == b"\n":
            pass
        result: dict[str, Any] = json.loads(line)["result"] if line else {}
        return result

    def events_until(self, revision: int) -> list[dict[str, Any]]:
        """All events up to `revision`, this included, or until the watch is cancelled. Waits for them.

        The result that cancels the watch comes last.
        """
        events: list[dict[str, Any]] = []
        while not events or int(events[-1]["kv"]["mod_revision"]) < revision:
            result = self.next()
            if result.get("canceled") or not result:
                return [*events, result]
            batch = result["events"]
            # Whole revisions only, in order.
            assert not events or events[-1]["kv"]["mod_revision"] != batch[0]["kv"]["mod_revision"], (
                "a revision was cut"
            )
            events += batch
        return events

    def close(self) -> None:
        self._response.close()
        self._connection.close()
