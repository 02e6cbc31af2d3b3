"""Unauthenticated connections to the served store, also a flood from one address: a client with the token gets in."""

from __future__ import annotations

import math
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.server import admission
from elaunch.rendezvous.server import server as server_module
from elaunch.rendezvous.server.admission import PER_ADDRESS
from elaunch.rendezvous.server.connection import Connection
from elaunch.rendezvous.server.server import Server
from tests.harness import wait_for
from tests.served import TOKEN, Gateway, ServerProcess, bound_socket, running, thread_serving

OPEN_FILES = 60
# The server itself uses 16 descriptors.
UNAUTHENTICATED = (OPEN_FILES - 16) // 4
EVERYTHING = {"key": "AA==", "range_end": "AA=="}


@pytest.fixture(scope="module")
def secret() -> Secret:
    return Secret(TOKEN)


def connected(port: int, host: str = "127.0.0.1", content: bytes = b"") -> socket.socket:
    """A connection from `host`, one of this host's loopback addresses, that has sent `content`."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=180, source_address=(host, 0))
    connection.sendall(content)
    return connection


@contextmanager
def crowd(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Unauthenticated connections from one address, each of which has sent one byte."""
    with ExitStack() as stack:
        them = [stack.enter_context(connected(port)) for _ in range(count)]
        for one in them:
            with suppress(OSError):
                one.sendall(b"\x16")
        yield them


def is_open(connection: socket.socket) -> bool:
    """Whether the server has not closed the connection."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_connections_of_one_byte_each_do_not_shut_an_agent_out_and_a_line_names_their_addresses(
    tmp_path: Path, secret: Secret
) -> None:
    logged = tmp_path / "stderr"
    with logged.open("wb") as stderr, ServerProcess(open_files=OPEN_FILES, stderr=stderr) as process:
        own = psutil.Process(process.process.pid).num_fds()
        with crowd(process.port, OPEN_FILES) as them:
            gateway = Gateway("127.0.0.1", process.port, secret)
            assert gateway.call("/v3/maintenance/status")[0] == 200
            gateway.close()
            still = sum(map(is_open, them))
            descriptors = psutil.Process(process.process.pid).num_fds() - own

    # It did not wait until the peers' twenty seconds were over: they would have been closed.
    assert 0 < still <= UNAUTHENTICATED
    assert descriptors <= UNAUTHENTICATED + 1
    lines = logged.read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(
        f"elaunch's store: all {UNAUTHENTICATED} slots for connections that have not shown the job's"
    )
    assert f"(127.0.0.1 has {UNAUTHENTICATED})" in lines[0]


def test_authenticated_agents_are_not_closed_for_unauthenticated_connections(secret: Secret) -> None:
    with ServerProcess(open_files=OPEN_FILES) as process:
        agents = [Gateway("127.0.0.1", process.port, secret) for _ in range(3 * UNAUTHENTICATED)]
        sockets = []
        for agent in agents:
            assert agent.call("/v3/maintenance/status")[0] == 200
            sockets.append(agent._calls.sock)

        with crowd(process.port, OPEN_FILES):
            assert all(agent.call("/v3/maintenance/status")[0] == 200 for agent in agents)

            # The agents used the same connections: http.client would silently open another.
            assert [agent._calls.sock for agent in agents] == sockets
        for agent in agents:
            agent.close()


def test_one_address_may_hold_few_unauthenticated_connections_for_long(
    secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CROWD_S", 0.2)
    with (
        thread_serving(secret) as (_, port),
        crowd(port, 3 * PER_ADDRESS) as them,
        connected(port, "127.0.0.2") as other,
    ):
        wait_for(lambda: sum(map(is_open, them)) <= PER_ADDRESS, "the oldest to be closed")

        assert [is_open(one) for one in them] == [False] * 2 * PER_ADDRESS + [True] * PER_ADDRESS
        assert is_open(other)


def drip(client: socket.socket) -> None:
    """Send a byte of a header that never ends."""
    client.send(b"x")


def silence(client: socket.socket) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize("does", [drip, silence])
@pytest.mark.parametrize("begins", ["in the handshake", "in the headers", "in an authorised body"])
def test_an_unauthenticated_connection_has_twenty_seconds_in_all(
    secret: Secret, begins: str, does: Callable[[socket.socket], None]
) -> None:
    with ServerProcess() as process:
        began_s = time.monotonic()
        client: socket.socket = connected(process.port)
        if begins == "in the handshake":
            # The header of a handshake record, whose content never comes.
            client.sendall(b"\x16\x03\x01\x40\x00")
        else:
            client = secret.client_context().wrap_socket(client)
            client.sendall(b"POST /v3/kv/put HTTP/1.1\r\nX: ")
        if begins == "in an authorised body":
            client.sendall(f"x\r\nContent-Length: 9999\r\nAuthorization: Bearer {secret.bearer}\r\n\r\n".encode())
        with client:
            until_closed(client, does, 60)

        assert 19 < time.monotonic() - began_s < 50


def until_closed(client: socket.socket, does: Callable[[socket.socket], None], deadline_s: float) -> float:
    """How long the server leaves the connection open, while the client does something again and again."""
    began_s = time.monotonic()
    client.settimeout(0.2)
    while time.monotonic() - began_s < deadline_s:
        try:
            does(client)
            if not client.recv(1000):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - began_s


def test_a_watch_that_is_never_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A reader without a processor for a while is not closed: none is before the other one has read everything.
    monkeypatch.setattr(server_module, "STALLED_S", math.inf)
    with thread_serving() as (server, port):
        gateway = Gateway("127.0.0.1", port)
        read, unread = gateway.watch(EVERYTHING), gateway.watch(EVERYTHING)
        revision = 0
        # More than the buffers of both sides and of the kernel hold.
        for _ in range(60):
            _, answer = gateway.put(b"a", b"x" * 500_000)
            revision = int(answer["header"]["revision"])
            read.events_until(revision)
        assert sum(bool(client.watcher) for client in server._clients) == 2

        monkeypatch.setattr(server_module, "STALLED_S", 0.5)
        wait_for(lambda: sum(bool(client.watcher) for client in server._clients) == 1, "the unread one to be closed")
        assert gateway.put(b"a")[0] == 200
        assert len(read.events_until(revision + 1)) == 1
        unread.close()


PEERS = 200


def client_hello(context: ssl.SSLContext) -> bytes:
    """The first message of a TLS client. It needs no token."""
    sent = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


def test_an_agent_comes_in_before_the_unauthenticated_peers_of_one_address_that_came_before_it(
    secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = client_hello(secret.client_context())
    order: list[str] = []
    read = Connection.read

    def noted(self: Connection, *limit: int) -> bytes:
        order.append(self.socket.getpeername()[0])
        return read(self, *limit)

    monkeypatch.setattr(Connection, "read", noted)
    listener = bound_socket()
    port = listener.getsockname()[1]
    # The server listens, but does not serve yet: all connections wait in the kernel's queue.
    server = Server(listener, secret)
    with ExitStack() as stack:
        for _ in range(PEERS):
            stack.enter_context(connected(port, "127.0.0.2", hello))
        stack.enter_context(connected(port, "127.0.0.1", hello))
        with running(server):
            wait_for(lambda: len(order) > PEERS, "all to be read")

    assert order.count("127.0.0.2") == PEERS
    assert order.index("127.0.0.1") <= 1


def test_a_flood_of_handshakes_is_logged_with_its_address_and_keeps_no_agent_out(
    secret: Secret, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # This replaces a slow server: it does one handshake in each turn, and every waiting connection counts as late.
    monkeypatch.setattr(server_module, "_HANDSHAKES_S", 0.0)
    monkeypatch.setattr(admission, "LAG_S", 0.0)
    hello = client_hello(secret.client_context())
    logged: list[str] = []
    with thread_serving(secret) as (_, port):
        known = Gateway("127.0.0.1", port, secret)
        assert known.call("/v3/maintenance/status")[0] == 200

        def is_logged() -> bool:
            with ExitStack() as stack:
                for _ in range(PEERS):
                    stack.enter_context(connected(port, "127.0.0.2", hello))
            logged.extend(line for line in capfd.readouterr().err.splitlines() if "TLS handshakes" in line)
            return bool(logged)

        wait_for(is_logged, "the line about the lag")
        assert known.call("/v3/maintenance/status")[0] == 200
        new = Gateway("127.0.0.1", port, secret)
        assert new.call("/v3/maintenance/status")[0] == 200
        known.close()
        new.close()

    assert len(logged) == 1
    assert "127.0.0.2 opens the most" in logged[0]
    assert "keep it out with a firewall, or give the job another --rdzv-endpoint" in logged[0]
