"""The gRPC transport, for an etcd whose gateway cannot be used, and its messages when gRPC fails too."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from elaunch.rendezvous.endpoint import Access, Endpoint, Login, Tls
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.store import Denied, Put, Txn, Unavailable, Update
from tests.certificates import Certificates
from tests.etcd import VERSIONS, Etcd, answered, client
from tests.harness import DEADLINE_S, free_ports, wait_for
from tests.relay import saying, silent

KEY = "/elaunch/access/x"
LOGIN = Login("agent", "the password")


def files(certificates: Certificates) -> Tls:
    return Tls(str(certificates.ca), str(certificates.client), str(certificates.client_key))


def denial(etcd: Etcd, access: Access) -> str:
    with closing(client(etcd.addresses, "grpc", access, DEADLINE_S)) as store, pytest.raises(Denied) as denied:
        store.read(KEY)
    return str(denied.value)


def unavailable(endpoint: Endpoint, deadline_s: float = DEADLINE_S) -> str:
    with closing(client([endpoint], "grpc", deadline_s=deadline_s)) as store, pytest.raises(Unavailable) as error:
        store.read(KEY)
    return str(error.value)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_common_name_beside_users_works(version: str, tmp_path: Path) -> None:
    told: list[Update] = []
    certificates = Certificates(tmp_path, client_name="somebody")
    with (
        Etcd(version, tls=certificates, client_certificates=True, users={LOGIN.user: LOGIN.password}) as etcd,
        closing(client(etcd.addresses, "grpc", Access(files(certificates), LOGIN), DEADLINE_S)) as store,
    ):
        assert store.check().startswith(version)
        store.grant(1, 60)
        store.watch(KEY, store.read(KEY).revision, told.append)
        store.commit(Txn((), (Put(KEY, "1", 1),)))

        wait_for(lambda: told, "word of the write")
        assert store.keep_alive(1) > 0
        store.revoke(1)


def test_keys_that_a_user_may_not_use_are_denied_to_calls_and_watches() -> None:
    told: list[Update] = []
    with (
        Etcd(users={LOGIN.user: LOGIN.password}) as etcd,
        closing(client(etcd.addresses, "grpc", Access(login=LOGIN, plainly=True), DEADLINE_S)) as store,
    ):
        with pytest.raises(Denied, match="user 'agent' may not use these keys"):
            store.read("/elsewhere")

        store.watch("/elsewhere", 0, told.append)

        wait_for(lambda: told, "the denial")
        assert [type(update) for update in told] == [Denied]


@pytest.mark.parametrize("version", VERSIONS)
def test_where_the_gateway_is_off_the_check_changes_to_grpc(version: str) -> None:
    told: list[Update] = []
    with (
        Etcd(version, members=3, options=["--enable-grpc-gateway=false"]) as etcd,
        closing(EtcdStore(etcd.addresses, deadline_s=60)) as store,
    ):
        etcd.members[0].kill()
        # Calls are refused while the others elect a leader.
        assert answered(store.check).startswith(version)
        store.watch(KEY, answered(lambda: store.read(KEY)).revision, told.append)
        answered(lambda: store.commit(Txn((), (Put(KEY, ""),))))
        wait_for(lambda: told, "word of the write")


def test_what_is_not_there_hangs_or_is_no_etcd_is_said() -> None:
    (port,) = free_ports(1)
    assert "refuses connections: nobody listens there" in unavailable(Endpoint("127.0.0.1", port))
    with silent() as mute:
        assert unavailable(mute.endpoint, 0.15) == f"no answer from {mute.endpoint} within 0.3 s"
    with saying(b"SSH-2.0-OpenSSH_9.2\r\n") as other:
        assert str(other.endpoint) in unavailable(other.endpoint)
