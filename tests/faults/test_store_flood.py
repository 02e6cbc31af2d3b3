"""One address floods the served store with connections. Agents at other addresses are served before it."""

from __future__ import annotations

import socket
import ssl
from contextlib import ExitStack

import pytest

from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.server import admission
from elaunch.rendezvous.server import server as server_module
from elaunch.rendezvous.server.connection import Connection
from elaunch.rendezvous.server.server import Server
from tests.harness import wait_for
from tests.served import TOKEN, Gateway, bound_socket, running, thread_serving

STRANGERS = 200


@pytest.fixture(scope="module")
def secret() -> Secret:
    return Secret(TOKEN)


def first_words(context: ssl.SSLContext) -> bytes:
    """The first message of a TLS client. It needs no token."""
    said = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said).do_handshake()
    return said.read()


def connected(port: int, host: str, words: bytes) -> socket.socket:
    """A connection from `host`, one of this host's loopback addresses, that has sent `words`."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=180, source_address=(host, 0))
    connection.sendall(words)
    return connection


def test_an_agent_comes_in_before_the_strangers_of_one_address_that_came_before_it(
    secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = first_words(secret.client_context())
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
        for _ in range(STRANGERS):
            stack.enter_context(connected(port, "127.0.0.2", words))
        stack.enter_context(connected(port, "127.0.0.1", words))
        with running(server):
            wait_for(lambda: len(order) > STRANGERS, "all to be heard")

    assert order.count("127.0.0.2") == STRANGERS
    assert order.index("127.0.0.1") <= 1


def test_a_flood_of_first_words_is_said_with_its_address_and_keeps_no_agent_out(
    secret: Secret, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # This replaces a slow server: it does one handshake in each turn, and every waiting connection counts as late.
    monkeypatch.setattr(server_module, "_HANDSHAKES_S", 0.0)
    monkeypatch.setattr(admission, "LAG_S", 0.0)
    words = first_words(secret.client_context())
    told: list[str] = []
    with thread_serving(secret) as (_, port):
        known = Gateway("127.0.0.1", port, secret)
        assert known.call("/v3/maintenance/status")[0] == 200

        def is_told() -> bool:
            with ExitStack() as stack:
                for _ in range(STRANGERS):
                    stack.enter_context(connected(port, "127.0.0.2", words))
            told.extend(line for line in capfd.readouterr().err.splitlines() if "TLS handshakes" in line)
            return bool(told)

        wait_for(is_told, "the line about the lag")
        assert known.call("/v3/maintenance/status")[0] == 200
        new = Gateway("127.0.0.1", port, secret)
        assert new.call("/v3/maintenance/status")[0] == 200
        known.close()
        new.close()

    assert len(told) == 1
    assert "127.0.0.2 opens the most" in told[0]
    assert "keep it out with a firewall, or give the job another --rdzv-endpoint" in told[0]
