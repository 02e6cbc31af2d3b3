"""Access to etcd, and a client's messages when it is refused: TLS, users, servers that are no etcd."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from elaunch.rendezvous.endpoint import Access, Endpoint, Login, Tls
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import GatewayOff, Json, JsonTransport, Rpc
from elaunch.rendezvous.store import Absent, Denied, Put, Rejected, Txn, Unavailable, Update
from tests.certificates import Certificates
from tests.etcd import VERSIONS, Etcd, client, writes
from tests.harness import DEADLINE_S, joined, slow, wait_for
from tests.relay import Listener, relay

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


def assert_works(store: EtcdStore, version: str) -> None:
    """All that an agent does."""
    received: list[Update] = []
    assert store.check().startswith(version)
    store.grant(1, 60)
    watch = store.watch(KEY, store.read(KEY).revision, received.append)

    answer = store.commit(Txn((), (Put(KEY, "1", 1),)))

    wait_for(lambda: received, "the update of the write")
    assert [update.revision for update in received if not isinstance(update, Exception)] == [answer.revision]
    assert store.keep_alive(1) > 0
    store.revoke(1)
    watch.close()


def denial(etcd: Etcd, access: Access) -> str:
    with closing(EtcdStore(etcd.addresses, access, DEADLINE_S)) as store, pytest.raises(Denied) as denied:
        checked_and_read(store)
    assert not isinstance(denied.value, GatewayOff)
    return str(denied.value)


def test_with_certificate_and_password_everything_works(secured: Etcd, certificates: Certificates) -> None:
    with closing(EtcdStore(secured.addresses, Access(files(certificates), LOGIN), DEADLINE_S)) as store:
        assert_works(store, secured.version)


def test_a_wrong_password_is_reported(secured: Etcd, certificates: Certificates) -> None:
    logged = denial(secured, Access(files(certificates), Login("agent", "wrong")))

    assert "the password of user 'agent' is wrong" in logged
    assert f"'{'wrong'}'" not in logged


def test_keys_that_a_user_may_not_use_are_denied_to_calls_and_watches(
    secured: Etcd, certificates: Certificates
) -> None:
    received: list[Update] = []
    with closing(EtcdStore(secured.addresses, Access(files(certificates), LOGIN), DEADLINE_S)) as store:
        with pytest.raises(Denied, match="user 'agent' may not use these keys"):
            store.commit(Txn((), (Put("/elsewhere", ""),)))

        with pytest.raises(Denied, match="user 'agent' may not use these keys"):
            store.watch("/elsewhere", None, lambda _: None).begun()

        store.watch("/elsewhere", 0, received.append)

        wait_for(lambda: received, "the denial")
        assert [type(update) for update in received] == [Denied]


def test_an_authority_that_did_not_sign_the_certificate_is_reported(secured: Etcd, tmp_path: Path) -> None:
    other = Certificates(tmp_path)

    assert "not trusted" in denial(secured, Access(files(other)))


def test_a_certificate_for_another_host_is_reported(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path, hosts=["etcd.example"])
    with Etcd(tls=certificates) as etcd:
        assert "not valid for '127.0.0.1'" in denial(etcd, Access(Tls(str(certificates.ca))))


def test_a_missing_client_certificate_is_reported(secured: Etcd, certificates: Certificates) -> None:
    assert "requires a client certificate" in denial(secured, Access(Tls(str(certificates.ca))))


class CountingTransport(JsonTransport):
    """The real one, which counts the passwords sent."""

    logins = 0

    def call(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> Json:
        self.logins += rpc is Rpc.AUTHENTICATE
        return super().call(endpoint, rpc, request, token, deadline_s)


@pytest.mark.parametrize("version", [slow("3.4"), "3.5"])
def test_a_token_that_has_run_out_is_renewed_for_calls_and_for_a_watch_that_is_opened_again(version: str) -> None:
    received: list[Update] = []
    transport = CountingTransport()
    with (
        Etcd(version, users={WORD.user: WORD.password}) as etcd,
        relay(etcd.addresses[0]) as way,
        closing(EtcdStore([way.endpoint], Access(login=WORD, plainly=True), DEADLINE_S, transport)) as store,
    ):
        store.watch(KEY, store.read(KEY).revision, received.append)
        store.commit(Txn((), (Put(KEY, "1"),)))
        wait_for(lambda: writes(received) == 1, "the update of the first write")
        assert transport.logins == 1

        etcd.forget_tokens(WORD.user)
        way.cut()
        way.restore()
        wait_for(lambda: transport.logins > 1, "the watch's new token")
        etcd.ctl("put", KEY, "2")
        wait_for(lambda: writes(received) == 2, "the update of the second write")

        logins = transport.logins
        etcd.forget_tokens(WORD.user)
        threads = [threading.Thread(target=store.read, args=(KEY,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        joined(*threads)
        assert store.commit(Txn((Absent(f"{KEY}y"),), (Put(f"{KEY}y", "2"),))).held
        assert transport.logins == logins + 1

        etcd.forget_tokens(WORD.user)
        again: list[Update] = []
        store.watch(KEY, None, again.append).begun()
        assert again[-1] == store.read(KEY)
        assert transport.logins == logins + 2


def test_a_server_that_answers_byte_by_byte_is_left_after_the_deadline_too() -> None:
    stop = threading.Event()

    def trickle(client: object) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000:
            client.sendall(bytes([byte]))  # type: ignore[attr-defined]
            if stop.wait(0.01):
                return

    with Listener(trickle) as listener, closing(EtcdStore([listener.endpoint], deadline_s=0.15)) as store:
        with pytest.raises((Unavailable, Rejected), match=rf"no answer from {listener.endpoint} within 0\.3 s"):
            store.read(KEY)
        with pytest.raises((Unavailable, Rejected)):
            store.check()
    stop.set()


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


def test_an_etcd_whose_version_only_root_may_read_is_accepted() -> None:
    def serve(client: socket.socket) -> None:
        # The response of etcd 3.5.30.
        client.recv(65536)
        body = b'{"code":7, "message":"etcdserver: permission denied"}'
        client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    with Listener(serve) as listener, closing(EtcdStore([listener.endpoint], deadline_s=DEADLINE_S)) as store:
        assert store.check() == ""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_common_name_beside_users_works(version: str, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path, client_name="somebody")
    with (
        Etcd(version, tls=certificates, client_certificates=True, users={LOGIN.user: LOGIN.password}) as etcd,
        closing(client(etcd.addresses, "grpc", Access(files(certificates), LOGIN), DEADLINE_S)) as store,
    ):
        assert_works(store, version)
