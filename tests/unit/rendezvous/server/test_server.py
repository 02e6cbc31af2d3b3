"""The served store's process and its server: access, bounds, and its end."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.server import admission, connection, server
from elaunch.rendezvous.server.connection import OUTGOING_BYTES_MAX
from elaunch.rendezvous.server.server import Server
from tests.descriptors import opened
from tests.harness import wait_for
from tests.served import SECRET, TOKEN, Gateway, ServerProcess, thread_serving

OTHER_TOKEN = "another token for tests"
BEARER = f"Authorization: Bearer {SECRET.bearer}\r\n".encode()


def text(data: bytes) -> str:
    return b64encode(data).decode()


def put(gateway: Gateway, key: bytes, value: bytes = b"", lease: int = 0) -> int:
    """Its revision."""
    status, answer = gateway.put(key, value, lease)
    assert status == 200, answer
    return int(answer["header"]["revision"])


def keys(gateway: Gateway) -> int:
    """How many there are."""
    return len(gateway.call("/v3/kv/range", {"key": text(b"\0"), "range_end": text(b"\0")})[1]["kvs"])


EVERYTHING = {"key": text(b"\0"), "range_end": text(b"\0"), "start_revision": "2"}


@pytest.fixture(scope="module")
def secret() -> Secret:
    return SECRET


@pytest.fixture
def process(secret: Secret) -> Iterator[ServerProcess]:
    with ServerProcess() as process:
        yield process


def client(process: ServerProcess, secret: Secret) -> Gateway:
    return Gateway(process.host, process.port, secret)


@pytest.fixture
def served() -> Iterator[tuple[Server, int]]:
    """A server in this process."""
    with thread_serving() as both:
        yield both


# Who gets in.


def test_the_process_reports_ready_and_serves_clients_with_the_token(process: ServerProcess, secret: Secret) -> None:
    assert process.ready_line == b"ready\n"

    gateway = client(process, secret)
    put(gateway, b"key")

    assert keys(gateway) == 1
    status, answer = gateway.call("/v3/maintenance/status")
    assert (status, answer["version"][:4]) == (200, "3.4.")


def test_a_client_with_another_token_refuses_to_speak_with_the_server(process: ServerProcess) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        client(process, Secret(OTHER_TOKEN)).call("/v3/maintenance/status")


@pytest.mark.parametrize("authorization", [None, "", "Bearer", f"Bearer {Secret(OTHER_TOKEN).bearer}", "Bearer é"])
@pytest.mark.parametrize("path", ["/v3/kv/range", "/v3/watch", "/version", "/nowhere"])
def test_a_client_without_the_bearer_learns_nothing(served_with_secret: Gateway, authorization: Any, path: str) -> None:
    gateway = served_with_secret
    gateway.headers = {} if authorization is None else {"Authorization": authorization}

    status, answer = gateway.call(path, {"key": text(b"key")})

    message = "etcdserver: invalid auth token"
    assert (status, answer) == (401, {"error": message, "code": 16, "message": message})


@pytest.fixture
def served_with_secret(secret: Secret) -> Iterator[Gateway]:
    with thread_serving(secret) as (_, port):
        gateway = Gateway("127.0.0.1", port, secret)
        yield gateway
        gateway.close()


@pytest.mark.parametrize("count", [1, 10_000])
def test_the_first_request_without_the_bearer_is_the_last_of_its_connection(secret: Secret, count: int) -> None:
    with thread_serving(secret) as (server, port), tls_connected(port, secret) as stranger:
        with suppress(OSError):
            stranger.sendall(b"GET /health HTTP/1.1\r\n\r\n" * count)

        assert read_all(stranger).count(b"HTTP/1.1 401 ") == 1
        assert not any(client.is_known for client in server._clients)


def tls_connected(port: int, secret: Secret) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=180)
    return secret.client_context().wrap_socket(plain)


def read_all(connection: socket.socket) -> bytes:
    """All until the server ends it."""
    pieces = []
    with suppress(ConnectionResetError, ssl.SSLEOFError):
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


def test_a_client_without_tls_gets_no_response_and_does_not_disturb(process: ServerProcess, secret: Secret) -> None:
    with socket.create_connection((process.host, process.port)) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        plain.settimeout(60)
        # An alert of TLS at most.
        with suppress(ConnectionResetError):
            assert b"HTTP" not in plain.recv(1000)

    assert keys(client(process, secret)) == 0


def test_the_token_is_in_no_place_that_others_can_read(process: ServerProcess) -> None:
    proc = Path(f"/proc/{process.process.pid}")

    assert TOKEN.encode() not in (proc / "cmdline").read_bytes()
    assert TOKEN.encode() not in (proc / "environ").read_bytes()


# When it ends.


def test_it_ends_when_the_other_end_of_stdin_is_closed(process: ServerProcess) -> None:
    assert process.process.stdin

    process.process.stdin.close()

    assert process.process.wait(180) == 0


def test_signals_that_a_scheduler_sends_to_all_of_a_job_do_not_end_it(process: ServerProcess, secret: Secret) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        process.process.send_signal(signum)

    assert keys(client(process, secret)) == 0
    assert process.process.poll() is None


# Time.


def test_leases_do_not_run_while_the_server_is_stopped(process: ServerProcess, secret: Secret) -> None:
    gateway = client(process, secret)
    gateway.call("/v3/lease/grant", {"ID": 7, "TTL": 4})
    put(gateway, b"key", lease=7)

    process.process.send_signal(signal.SIGSTOP)
    stopped_until_s = time.monotonic() + 5
    wait_for(lambda: time.monotonic() > stopped_until_s, "more than the lease's time")
    process.process.send_signal(signal.SIGCONT)

    assert gateway.call("/v3/lease/keepalive", {"ID": 7})[1]["result"]["TTL"] == "4"
    assert keys(gateway) == 1


# What is bounded.


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may read nothing for as long as a test takes on a busy machine."""
    monkeypatch.setattr(server, "STALLED_S", 600.0)
    monkeypatch.setattr(connection, "_DEAD_AFTER_S", 600)


def test_a_slow_reader_delays_no_other_gets_all_in_the_end_and_little_waits_for_it(
    patient: None, served: tuple[Server, int]
) -> None:
    server, port = served
    gateway = Gateway("127.0.0.1", port)
    slow, quick = gateway.watch(EVERYTHING), gateway.watch(EVERYTHING)
    writes, size = 100, 200_000
    first = put(gateway, b"key", b"x" * size)

    for _ in range(writes - 1):
        revision = put(gateway, b"key", b"x" * size)
        # The quick one has it at once, though the slow one has taken nothing.
        assert quick.events_until(revision)[-1]["kv"]["mod_revision"] == str(revision)
    waiting = max(len(other.outgoing) for other in server._clients)

    received = [int(event["kv"]["mod_revision"]) for event in slow.events_until(revision)]
    assert received == list(range(first, revision + 1))
    # What is sent of the history at a time are two revisions here, in base64.
    assert waiting < OUTGOING_BYTES_MAX + 4 * size


def test_from_a_client_that_does_not_read_responses_no_more_is_read(patient: None, served: tuple[Server, int]) -> None:
    server, port = served
    gateway = Gateway("127.0.0.1", port)
    put(gateway, b"key", b"x" * 500_000)
    body = json.dumps({"key": text(b"key")}).encode()
    request = b"POST /v3/kv/range HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (BEARER, len(body), body)

    with tls_connected(port, SECRET) as rude:
        rude.sendall(request * 200)
        assert rude.recv(1) == b"H"
        assert keys(gateway) == 1
        waiting = max(len(other.outgoing) for other in server._clients)

    assert waiting < OUTGOING_BYTES_MAX + 800_000


def test_a_request_that_is_too_large_is_refused(served: tuple[Server, int]) -> None:
    _, port = served

    with tls_connected(port, SECRET) as connection:
        length = server.REQUEST_BYTES_MAX + 1
        connection.sendall(b"POST /v3/kv/put HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (BEARER, length))
        answer = connection.recv(1000)

    assert answer.startswith(b"HTTP/1.1 413 ")


def test_silent_connections_are_closed_and_watches_are_not(
    served: tuple[Server, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, port = served
    monkeypatch.setattr(server, "IDLE_S", 0.1)
    monkeypatch.setattr(admission, "FIRST_REQUEST_S", 0.1)
    gateway = Gateway("127.0.0.1", port)
    watch = gateway.watch(EVERYTHING)

    for first in (b"", b"POST /v3/maintenance/status HTTP/1.1\r\n%b\r\n" % BEARER, b"GET /health"):
        with tls_connected(port, SECRET) as silent:
            silent.sendall(first)
            read_all(silent)
    revision = put(Gateway("127.0.0.1", port), b"key")

    assert len(watch.events_until(revision)) == 1


def test_connections_beyond_the_most_are_turned_away_with_a_line_and_let_in_later(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def let_in() -> bool:
        try:
            return keys(Gateway("127.0.0.1", port)) == 0
        except OSError:
            return False

    with thread_serving(slots=2) as (_, port):
        first, second = Gateway("127.0.0.1", port), Gateway("127.0.0.1", port)
        assert keys(first) == keys(second) == 0

        assert not any(let_in() for _ in range(3))
        first.close()

        wait_for(let_in, "a free place")
    output = capfd.readouterr().err
    assert output.count("\n") == 1
    assert "agents take all 2 slots for connections, and further connections are refused; raise the limit" in output


def test_a_process_without_descriptors_serves_on_and_accepts_again_when_it_has_some(secret: Secret) -> None:
    with ServerProcess() as process:
        spare = 8
        server = psutil.Process(process.process.pid)
        server.rlimit(psutil.RLIMIT_NOFILE, (server.num_fds() + spare, server.num_fds() + spare))
        gateway = client(process, secret)
        assert keys(gateway) == 0

        crowd = [socket.create_connection((process.host, process.port)) for _ in range(spare + 4)]
        wait_for(lambda: server.num_fds() >= server.rlimit(psutil.RLIMIT_NOFILE)[0], "no descriptor left")
        assert keys(gateway) == 0
        # The server closes the oldest connection of the crowd.
        assert keys(client(process, secret)) == 0
        for each in crowd:
            each.close()

        assert keys(client(process, secret)) == 0


# HTTP.


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v3/kv/range", "{"),
        ("/v3/kv/range", "[" * 100_000),
        ("/v3/kv/range", "[]"),
        ("/v3/kv/range", b"\xff"),
        ("/v3/kv/range", '{"key":"a"}'),
        ("/v3/kv/range", '{"key":5}'),
        ("/v3/kv/range", '{"key":"YQ=="}'),
        ("/v3/lease/grant", '{"ID":1.5,"TTL":3}'),
        ("/v3/lease/grant", '{"ID":true,"TTL":3}'),
        ("/v3/lease/grant", '{"ID":"9223372036854775808","TTL":3}'),
        ("/v3/kv/txn", '{"success":{"a":1}}'),
        ("/v3/kv/txn", '{"compare":[{"target":"VALUE","result":"EQUAL","key":"YQ=="}]}'),
        ("/v3/kv/txn", '{"success":[{"request_txn":{}}]}'),
        ("/v3/kv/txn", '{"success":[{}]}'),
        ("/v3/watch", '{"create_request":{"key":"YQ=="}}'),
    ],
)
def test_what_cannot_be_understood_is_refused(served: tuple[Server, int], path: str, body: Any) -> None:
    _, port = served
    gateway = Gateway("127.0.0.1", port)

    status, answer = gateway.call(path, body)

    assert (status, answer["code"]) == (400, 3)
    assert "does not understand" in answer["message"]
    assert gateway.call("/v3/maintenance/status")[0] == 200


def test_a_fault_of_the_server_fails_one_request(
    served: tuple[Server, int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server, port = served
    gateway = Gateway("127.0.0.1", port)
    monkeypatch.setattr(server.engine, "commit", lambda txn: 1 / 0)

    status, answer = gateway.put(b"key")

    assert (status, answer["code"]) == (500, 13)
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert keys(gateway) == 0


@pytest.mark.slow
def test_a_thousand_agents_with_two_connections_each_are_served(process: ServerProcess, secret: Secret) -> None:
    agents = [client(process, secret) for _ in range(1024)]
    for number, agent in enumerate(agents, 1):
        agent.call("/v3/lease/grant", {"ID": number, "TTL": 600})
        revision = put(agent, b"members/%d" % number, b"x" * 100, lease=number)
    watches = [agent.watch({**EVERYTHING, "start_revision": str(revision + 1)}) for agent in agents]
    memory = psutil.Process(process.process.pid).memory_info().rss

    sealed = put(agents[0], b"ctl", b"x" * 12_000)

    assert all(len(watch.events_until(sealed)) == 1 for watch in watches)
    assert keys(agents[-1]) == 1025
    # 256 KiB for each connection, as asyncio's TLS has it, would be 512 MiB.
    assert memory < 200 << 20


def test_nothing_is_left_open(secret: Secret) -> None:
    before = opened()
    with thread_serving(secret) as (_, port):
        gateway = Gateway("127.0.0.1", port, secret)
        keys(gateway)
        gateway.close()

    assert not opened() - before
