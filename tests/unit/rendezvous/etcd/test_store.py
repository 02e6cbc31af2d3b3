"""rendezvous.etcd.store keeps the store's contract on real etcd, whatever its version, and on the served store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import NamedTuple

import pytest

from elaunch.rendezvous.endpoint import Access, Endpoint
from elaunch.rendezvous.engine import Engine
from elaunch.rendezvous.etcd.json_codec import range_end
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.store import Delete, Denied, Txn, Unavailable
from tests.etcd import VERSIONS, Etcd, client
from tests.harness import slow, wait_for
from tests.served import TOKEN, thread_serving
from tests.unit.rendezvous.store_contract import ROOT, StoreContract

# Generous: a busy machine is no fault of the store's.
DEADLINE_S = 60.0


@pytest.fixture(scope="module", params=[VERSIONS[0], slow(VERSIONS[-1])])
def etcd(request: pytest.FixtureRequest) -> Iterator[Etcd]:
    with Etcd(request.param) as server:
        yield server


class Served(NamedTuple):
    """A served store in this process."""

    engine: Engine
    endpoint: Endpoint


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with thread_serving(Secret(TOKEN)) as (server, port):
        yield Served(server.engine, Endpoint("127.0.0.1", port))


def emptied(store: EtcdStore) -> EtcdStore:
    """The store without what an earlier test has put. On a busy machine gRPC may give a first connection up."""

    def is_done() -> bool:
        with suppress(Unavailable):
            store.commit(Txn((), (Delete(ROOT, range_end(ROOT).decode()),)))
            return True
        return False

    wait_for(is_done, "an answer of the store")
    return store


def client_of(served: Served, token: str = TOKEN) -> EtcdStore:
    secret = Secret(token)
    return EtcdStore([served.endpoint], Access(secret.client_context(), bearer=secret.bearer), DEADLINE_S)


class TestEtcdStore(StoreContract):
    transport = "gateway"

    @pytest.fixture
    def store(self, etcd: Etcd) -> Iterator[EtcdStore]:
        with closing(client(etcd.addresses, self.transport, deadline_s=DEADLINE_S)) as store:
            yield emptied(store)

    @pytest.fixture
    def compact(self, etcd: Etcd) -> Callable[[int], None]:
        return etcd.compact


@pytest.mark.parametrize("etcd", [slow(VERSIONS[0]), VERSIONS[-1]], indirect=True, scope="module")
class TestEtcdStoreByGrpc(TestEtcdStore):
    transport = "grpc"


class TestServedStore(StoreContract):
    @pytest.fixture
    def store(self, served: Served) -> Iterator[EtcdStore]:
        with closing(client_of(served)) as store:
            yield emptied(store)

    @pytest.fixture
    def compact(self, served: Served) -> Callable[[int], None]:
        return served.engine.compact


def test_another_token_is_denied_with_the_way_out(served: Served) -> None:
    store = client_of(served, "quite another token")

    with pytest.raises(Denied, match="is ELAUNCH_TOKEN that of the elaunch that runs there"):
        store.check()


def test_the_right_certificate_with_another_bearer_is_denied(served: Served) -> None:
    context = Secret(TOKEN).client_context()
    store = EtcdStore([served.endpoint], Access(context, bearer="wrong"), DEADLINE_S)

    with pytest.raises(Denied, match="is ELAUNCH_TOKEN that of the elaunch that runs there"):
        store.read(ROOT)


def test_without_tls_the_served_store_is_reported_to_speak_https(served: Served) -> None:
    store = EtcdStore([served.endpoint], deadline_s=DEADLINE_S)

    with pytest.raises(Denied, match="https"):
        store.check()
