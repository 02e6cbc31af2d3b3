"""Access to etcd, and a client's messages when it is refused: TLS, users, servers that are no etcd."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from elaunch.rendezvous.endpoint import Access, Endpoint, Login, Tls
from elaunch.rendezvous.etcd.json_transport import JsonTransport
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import GatewayOff, Json, Rpc
from elaunch.rendezvous.http.client import ClientConnection, Trust
from elaunch.rendezvous.http.dial import Deadline
from elaunch.rendezvous.store import Absent, Denied, Put, Rejected, StoreError, TimedOut, Txn, Unavailable, Update
from tests.certificates import Certificates
from tests.etcd import VERSIONS, Etcd, client, writes
from tests.faults.processes import LIGHT
from tests.harness import DEADLINE_S, finished, free_ports, joined, script, slow, wait_for
from tests.relay import Listener, relay, saying, silent, web_server

KEY = "/elaunch/access/x"
LOGIN = Login("agent", "the password")
# etcdctl reads a word.
WORD = Login("agent", "word")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module", params=VERSIONS)
def secured(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[Etcd]:
    """TLS both ways, and users."""
    users = {LOGIN.user: LOGIN.password, "stranger": "x"}
    with Etcd(request.param, tls=certificates, client_certificates=True, users=users) as etcd:
        yield etcd


def files(certificates: Certificates) -> Tls:
    return Tls(str(certificates.ca), str(certificates.client), str(certificates.client_key))


def checked_and_read(store: EtcdStore) -> None:
    store.check()
    store.read(KEY)


def denial(etcd: Etcd, access: Access) -> str:
    with closing(EtcdStore(etcd.addresses, access, DEADLINE_S)) as store, pytest.raises(Denied) as denied:
        checked_and_read(store)
    assert not isinstance(denied.value, GatewayOff)
    return str(denied.value)


def test_with_certificate_and_password_everything_works(secured: Etcd, certificates: Certificates) -> None:
    told: list[Update] = []
    with closing(EtcdStore(secured.addresses, Access(files(certificates), LOGIN), DEADLINE_S)) as store:
        assert store.check().startswith(secured.version)
        store.grant(1, 60)
        watch = store.watch(KEY, store.read(KEY).revision, told.append)

        answer = store.commit(Txn((), (Put(KEY, "1", 1),)))

        wait_for(lambda: told, "word of the write")
        assert [update.revision for update in told if not isinstance(update, Exception)] == [answer.revision]
        assert store.keep_alive(1) > 0
        store.revoke(1)
        watch.close()


def test_a_wrong_password_is_said(secured: Etcd, certificates: Certificates) -> None:
    said = denial(secured, Access(files(certificates), Login("agent", "wrong")))

    assert "the password of user 'agent' is wrong" in said
    assert f"'{'wrong'}'" not in said


def test_no_user_where_one_is_needed_is_said(secured: Etcd, certificates: Certificates) -> None:
    assert "asks for a user and a password" in denial(secured, Access(files(certificates)))


def test_keys_that_a_user_may_not_use_are_denied_to_calls_and_watches(
    secured: Etcd, certificates: Certificates
) -> None:
    told: list[Update] = []
    with closing(EtcdStore(secured.addresses, Access(files(certificates), LOGIN), DEADLINE_S)) as store:
        with pytest.raises(Denied, match="user 'agent' may not use these keys"):
            store.commit(Txn((), (Put("/elsewhere", ""),)))

        with pytest.raises(Denied, match="user 'agent' may not use these keys"):
            store.watch("/elsewhere", None, lambda _: None).begun()

        store.watch("/elsewhere", 0, told.append)

        wait_for(lambda: told, "the denial")
        assert [type(update) for update in told] == [Denied]


def test_a_user_where_there_are_none_is_said() -> None:
    with Etcd() as etcd:
        assert "this store has no users" in denial(etcd, Access(login=LOGIN, plainly=True))


def test_an_authority_that_did_not_sign_the_certificate_is_said(secured: Etcd, tmp_path: Path) -> None:
    other = Certificates(tmp_path)

    assert "not trusted" in denial(secured, Access(files(other)))


def test_a_certificate_for_another_host_is_said(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path, hosts=["etcd.example"])
    with Etcd(tls=certificates) as etcd:
        assert "not valid for '127.0.0.1'" in denial(etcd, Access(Tls(str(certificates.ca))))


def test_a_missing_client_certificate_is_said(secured: Etcd, certificates: Certificates) -> None:
    assert "asks for a client certificate" in denial(secured, Access(Tls(str(certificates.ca))))


def test_a_client_certificate_of_another_authority_is_said(
    secured: Etcd, certificates: Certificates, tmp_path: Path
) -> None:
    other = Certificates(tmp_path)
    tls = Tls(str(certificates.ca), str(other.client), str(other.client_key))

    assert "asks for a client certificate" in denial(secured, Access(tls))


def test_http_and_https_mixed_up_are_said(secured: Etcd, certificates: Certificates) -> None:
    assert f"use https://{secured.addresses[0]}" in denial(secured, Access())
    with Etcd(secured.version) as plain:
        assert f"use http://{plain.addresses[0]}" in denial(plain, Access(files(certificates)))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "ca.pem")

    with pytest.raises(Denied, match=r"ca\.pem"):
        EtcdStore([Endpoint("127.0.0.1", 1)], Access(Tls(missing)))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_common_name_beside_users_is_said_with_the_way_out(version: str, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path, client_name="somebody")
    with Etcd(version, tls=certificates, client_certificates=True, users={LOGIN.user: LOGIN.password}) as etcd:
        said = denial(etcd, Access(files(certificates), LOGIN))

    assert "carries a common name" in said
    assert "transport=grpc" in said


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_certificate_that_the_gateway_cannot_use_is_said(version: str, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path, server_alone=True)
    with (
        Etcd(version, tls=certificates, client_certificates=True) as etcd,
        closing(EtcdStore(etcd.addresses, Access(files(certificates)), DEADLINE_S)) as store,
        pytest.raises(StoreError, match="put clientAuth beside serverAuth"),
    ):
        store.check()


def test_the_gateway_is_off_in_3_4_with_a_configuration_file_and_the_client_says_what_to_do() -> None:
    with Etcd("3.4", from_file=True) as etcd, closing(client(etcd.addresses, deadline_s=DEADLINE_S)) as store:
        with pytest.raises(GatewayOff, match=f"{etcd.addresses[0]} is off; start etcd with --enable-grpc-gateway=true"):
            store.check()
        with pytest.raises(Denied, match="gateway"):
            store.read(KEY)


class CountingTransport(JsonTransport):
    """The real one, which counts the passwords sent."""

    logins = 0

    def call(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> Json:
        self.logins += rpc is Rpc.AUTHENTICATE
        return super().call(endpoint, rpc, request, token, deadline_s)


@pytest.mark.parametrize("version", [slow("3.4"), "3.5"])
def test_a_token_that_has_run_out_is_renewed_for_calls_and_for_a_watch_that_is_opened_again(version: str) -> None:
    told: list[Update] = []
    transport = CountingTransport()
    with (
        Etcd(version, users={WORD.user: WORD.password}) as etcd,
        relay(etcd.addresses[0]) as way,
        closing(EtcdStore([way.endpoint], Access(login=WORD, plainly=True), DEADLINE_S, transport)) as store,
    ):
        store.watch(KEY, store.read(KEY).revision, told.append)
        store.commit(Txn((), (Put(KEY, "1"),)))
        wait_for(lambda: writes(told) == 1, "word of the first write")
        assert transport.logins == 1

        etcd.forget_tokens(WORD.user)
        way.cut()
        way.restore()
        wait_for(lambda: transport.logins > 1, "the watch's new token")
        etcd.ctl("put", KEY, "2")
        wait_for(lambda: writes(told) == 2, "word of the second write")

        logins = transport.logins
        etcd.forget_tokens(WORD.user)
        threads = [threading.Thread(target=store.read, args=(KEY,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        joined(*threads)
        assert store.commit(Txn((Absent(f"{KEY}y"),), (Put(f"{KEY}y", "2"),))).held
        assert transport.logins == logins + 1

        etcd.forget_tokens(WORD.user)
        anew: list[Update] = []
        store.watch(KEY, None, anew.append).begun()
        assert anew[-1] == store.read(KEY)
        assert transport.logins == logins + 2


def refusal(listener: Listener, deadline_s: float = DEADLINE_S) -> str:
    with listener, closing(EtcdStore([listener.endpoint], deadline_s=deadline_s)) as store:
        with pytest.raises((Unavailable, Rejected)) as error:
            store.read(KEY)
        with pytest.raises((Unavailable, Rejected)):
            store.check()
        wait_for(lambda: listener.accepted, "a connection")
        return str(error.value).replace(str(listener.endpoint), "HOST")


def test_a_closed_port_is_said() -> None:
    (port,) = free_ports(1)
    store = EtcdStore([Endpoint("127.0.0.1", port)], deadline_s=DEADLINE_S)

    with pytest.raises(Unavailable, match=f"127.0.0.1:{port} refuses connections: nobody listens there"):
        store.read(KEY)


def test_ipv6_works_by_address_and_a_name_by_whichever_of_its_addresses_answers() -> None:
    with Etcd(hosts=["::1"]) as etcd, closing(client(etcd.addresses, deadline_s=DEADLINE_S)) as store:
        assert str(etcd.addresses[0]).startswith("[::1]:")
        assert store.check()
        assert store.commit(Txn((), (Put(KEY, ""),))).held
    with Etcd() as etcd:
        by_name = Endpoint("localhost", etcd.addresses[0].port)
        with closing(client([by_name], deadline_s=DEADLINE_S)) as store:
            assert store.check()


def test_a_name_that_does_not_resolve_is_said() -> None:
    store = EtcdStore([Endpoint("nobody.invalid", 2379)], deadline_s=DEADLINE_S)

    with pytest.raises(Unavailable, match=r"the name nobody\.invalid cannot be resolved"):
        store.read(KEY)


def test_a_server_that_never_answers_is_left_after_the_deadline() -> None:
    assert "no answer from HOST within 0.3 s" in refusal(silent(), 0.15)


def test_a_server_that_answers_byte_by_byte_is_left_after_the_deadline_too() -> None:
    stop = threading.Event()

    def trickle(client: object) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000:
            client.sendall(bytes([byte]))  # type: ignore[attr-defined]
            if stop.wait(0.01):
                return

    said = refusal(Listener(trickle), 0.15)
    stop.set()

    assert "no answer from HOST within 0.3 s" in said


@pytest.mark.parametrize(("late_s", "is_taken"), [(1.0, True), (DEADLINE_S + 1, False)])
def test_an_answer_that_arrived_in_time_is_taken_by_a_thread_that_is_late(late_s: float, is_taken: bool) -> None:
    # More than one piece, and no more than waits in the kernel for its reader.
    body = os.urandom(150_000)
    sent = threading.Event()

    def serve(client: socket.socket) -> None:
        client.recv(65536)
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        sent.set()

    with Listener(serve) as listener:
        connection = ClientConnection(listener.endpoint, Trust(), Deadline(DEADLINE_S))
        connection.ask("POST", "/", {}, b"{}", Deadline(DEADLINE_S))
        assert sent.wait(DEADLINE_S)
        deadline = Deadline(DEADLINE_S)
        deadline._end_s = time.monotonic() - late_s

        with nullcontext() if is_taken else pytest.raises(TimedOut):
            assert connection.body(deadline) == body
        connection.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak HTTP"),
        (b"", "ended the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}", "sent a garbled answer (IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{]", "no JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n[1, 2, 3, 4, 5", "no JSON"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"kvs":[{}]}', "cannot be understood"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"header":"x"}', "cannot be understood"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "sent a garbled answer"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\n\r\nproxy", "HTTP status 502"),
        (os.urandom(4096).replace(b"HTTP", b"xxxx"), "does not speak HTTP"),
    ],
)
def test_a_server_that_talks_nonsense_is_quoted(answer: bytes, words: str) -> None:
    assert words in refusal(saying(answer))


def test_an_older_etcd_is_refused_with_its_version() -> None:
    body = b'{"etcdserver":"3.3.27","etcdcluster":"3.3.0"}'

    def serve(client: socket.socket) -> None:
        # Its gateway is at /v3beta.
        client.recv(65536)
        client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 10\r\n\r\nNot Found\n")
        client.recv(65536)
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    with Listener(serve) as listener:
        store = EtcdStore([listener.endpoint], deadline_s=DEADLINE_S)

        with pytest.raises(Denied, match=r"is etcd 3\.3\.27; elaunch needs 3\.4 or later"):
            store.check()


@pytest.mark.parametrize(
    "words", ["{}", "http://{}", "{},{}", "{} --rdzv-backend etcd", "{} --token-file token", "{} --rdzv-backend c10d"]
)
def test_a_web_server_in_place_of_the_store_is_one_sentence_however_it_is_named(tmp_path: Path, words: str) -> None:
    script(tmp_path, "")
    (tmp_path / "token").write_text("0123456789abcdef0123456789abcdef\n")

    with web_server(404, b"File not found") as place:
        argv = (*LIGHT, "--nnodes", "2", "--rdzv-endpoint", *words.replace("{}", str(place)).split(), "train.py")
        job = finished(tmp_path, *argv, env={"HOME": str(tmp_path)})

    assert job.code == 2
    assert [line for line in job.stderr.splitlines() if str(place) in line or "etcd" in line] == [
        f"elaunch: what listens at {place} is no etcd: it answers /version with HTTP status 404 and 'File not found';"
        " name an etcd, or a free port of one of the nodes"
    ]
