"""rendezvous.etcd keeps the store's contract on real etcd, whatever its version, and on the served store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from elaunch.rendezvous.access import Access
from elaunch.rendezvous.carrier import Json, Rpc
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.gateway import range_end
from elaunch.rendezvous.gateway_carrier import GatewayCarrier
from elaunch.rendezvous.plan import Endpoint
from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.store import Delete, Denied, Put, Txn
from tests.etcd import VERSIONS, Etcd, client
from tests.served import Gateway, ServerProcess
from tests.unit.store_contract import ROOT, StoreContract

# Generous: a busy machine is no fault of the store's.
DEADLINE_S = 10.0


@pytest.fixture(scope="module", params=VERSIONS)
def etcd(request: pytest.FixtureRequest) -> Iterator[Etcd]:
    with Etcd(request.param) as server:
        yield server


@pytest.fixture(scope="module")
def served() -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server


def emptied(store: EtcdStore) -> EtcdStore:
    store.commit(Txn((), (Delete(ROOT, range_end(ROOT).decode()),)))
    return store


def client_of(server: ServerProcess, token: str = "") -> EtcdStore:
    secret = Secret(token or server.token)
    return EtcdStore(
        [Endpoint(server.host, server.port)], Access(secret.client_context(), bearer=secret.bearer), DEADLINE_S
    )


class TestEtcdStore(StoreContract):
    transport = "gateway"

    @pytest.fixture
    def store(self, etcd: Etcd) -> Iterator[EtcdStore]:
        with closing(client(etcd.addresses, self.transport, deadline_s=DEADLINE_S)) as store:
            yield emptied(store)

    @pytest.fixture
    def compact(self, etcd: Etcd) -> Callable[[int], None]:
        return etcd.compact


@pytest.mark.parametrize(
    "etcd", [pytest.param(VERSIONS[0], marks=pytest.mark.slow), VERSIONS[-1]], indirect=True, scope="module"
)
class TestEtcdStoreByGrpc(TestEtcdStore):
    transport = "grpc"


class TestServedStore(StoreContract):
    @pytest.fixture
    def store(self, served: ServerProcess) -> Iterator[EtcdStore]:
        with closing(client_of(served)) as store:
            yield emptied(store)

    @pytest.fixture
    def compact(self, served: ServerProcess) -> Callable[[int], None]:
        def forget(revision: int) -> None:
            with closing(Gateway(served.host, served.port, Secret(served.token))) as gateway:
                assert gateway.call("/v3/kv/compaction", {"revision": str(revision)})[0] == 200

        return forget


def test_the_served_store_passes_for_an_etcd_that_is_new_enough(served: ServerProcess) -> None:
    with closing(client_of(served)) as store:
        assert store.check() >= "3.4"


def test_another_token_is_denied_with_the_way_out(served: ServerProcess) -> None:
    store = client_of(served, "quite another token")

    with pytest.raises(Denied, match="is ELAUNCH_TOKEN that of the elaunch that runs there"):
        store.check()


def test_the_right_certificate_with_another_bearer_is_denied(served: ServerProcess) -> None:
    context = Secret(served.token).client_context()
    store = EtcdStore([Endpoint(served.host, served.port)], Access(context, bearer="wrong"), DEADLINE_S)

    with pytest.raises(Denied, match="is ELAUNCH_TOKEN that of the elaunch that runs there"):
        store.read(ROOT)


def test_without_tls_the_served_store_is_said_to_speak_https(served: ServerProcess) -> None:
    store = EtcdStore([Endpoint(served.host, served.port)], deadline_s=DEADLINE_S)

    with pytest.raises(Denied, match="https"):
        store.check()


class Asked(GatewayCarrier):
    """Notes which calls are made."""

    def __init__(self) -> None:
        super().__init__()
        self.rpcs: list[Rpc] = []

    def call(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> Json:
        self.rpcs.append(rpc)
        return super().call(endpoint, rpc, request, token, deadline_s)


def test_several_prefixes_are_read_at_one_revision_and_in_no_transaction(etcd: Etcd) -> None:
    # An etcd before 3.5.5 panics when a client gives up a transaction that only reads.
    carrier = Asked()
    with closing(EtcdStore(etcd.addresses, deadline_s=DEADLINE_S, carrier=carrier)) as store:
        emptied(store)
        there = store.commit(Txn((), tuple(Put(f"{ROOT}{name}", "1") for name in ("b/1", "a/1", "c/1")))).revision
        carrier.rpcs.clear()

        view = store.read(f"{ROOT}b/", f"{ROOT}a/", ROOT)

        assert list(view.entries) == [f"{ROOT}{name}" for name in ("a/1", "b/1", "c/1")]
        assert view.revision == there
        assert carrier.rpcs == [Rpc.RANGE] * 3
