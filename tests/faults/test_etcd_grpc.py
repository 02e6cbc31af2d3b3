"""The gRPC transport, for an etcd whose gateway cannot be used, and its messages when gRPC fails too."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from elaunch.rendezvous.endpoint import Access, Login, Tls
from elaunch.rendezvous.store import Put, Txn, Update
from tests.certificates import Certificates
from tests.etcd import VERSIONS, Etcd, client
from tests.harness import DEADLINE_S, wait_for

KEY = "/elaunch/access/x"
LOGIN = Login("agent", "the password")


def files(certificates: Certificates) -> Tls:
    return Tls(str(certificates.ca), str(certificates.client), str(certificates.client_key))


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
