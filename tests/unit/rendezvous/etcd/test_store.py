"""rendezvous.etcd.store keeps the store's contract on real etcd, whatever its version, and on the served store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import NamedTuple

import pytest

from elaunch.rendezvous.endpoint import Access, Endpoint
from elaunch.rendezvous.engine.engine import Engine
from elaunch.rendezvous.etcd import grpc_transport
from elaunch.rendezvous.etcd import store as etcd_module
from elaunch.rendezvous.etcd.json_codec import range_end
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import GatewayOff
from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.store import Delete, Denied, Rejected, StoreError, TimedOut, Txn, Unavailable
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


def test_the_served_store_passes_for_an_etcd_that_is_new_enough(served: Served) -> None:
    with closing(client_of(served)) as store:
        assert store.check() >= "3.4"


def test_another_token_is_denied_with_the_way_out(served: Served) -> None:
    store = client_of(served, "quite another token")

    with pytest.raises(Denied, match="is ELAUNCH_TOKEN that of the elaunch that runs there"):
        store.check()


def test_the_right_certificate_with_another_bearer_is_denied(served: Served) -> None:
    context = Secret(TOKEN).client_context()
    store = EtcdStore([served.endpoint], Access(context, bearer="wrong"), DEADLINE_S)

    with pytest.raises(Denied, match="is ELAUNCH_TOKEN that of the elaunch that runs there"):
        store.read(ROOT)


def test_without_tls_the_served_store_is_said_to_speak_https(served: Served) -> None:
    store = EtcdStore([served.endpoint], deadline_s=DEADLINE_S)

    with pytest.raises(Denied, match="https"):
        store.check()


class Member:
    """A transport to a member that says of each request for its version what it is told to."""

    def __init__(self, *answers: str | StoreError) -> None:
        self._answers = list(answers)
        self.is_closed = False

    def version(self, endpoint: Endpoint, token: str, deadline_s: float) -> str:
        answer = self._answers.pop(0)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def close(self) -> None:
        self.is_closed = True


def by(gateway: Member, grpc: Member, monkeypatch: pytest.MonkeyPatch) -> EtcdStore:
    """A store that speaks to its only member by these."""
    monkeypatch.setattr(etcd_module, "JsonTransport", lambda *_: gateway)
    monkeypatch.setattr(grpc_transport, "GrpcTransport", lambda _: grpc)
    return EtcdStore([Endpoint("etcd-a", 2379)])


@pytest.mark.parametrize("failure", [TimedOut("no answer"), Unavailable("nobody listens"), Rejected("a 502")])
def test_where_grpc_gets_no_answer_either_the_gateway_is_asked_again(
    failure: StoreError, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, grpc = Member(GatewayOff("a proxy's 404"), "3.5.1"), Member(failure)
    store = by(gateway, grpc, monkeypatch)
    with pytest.raises(type(failure)):
        store.check()

    assert (grpc.is_closed, gateway.is_closed) == (True, False)
    assert store.check() == "3.5.1"


def test_where_the_gateway_is_off_and_grpc_answers_that_is_spoken_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, grpc = Member(GatewayOff("the gateway is off")), Member("3.5.1", "3.5.2")
    store = by(gateway, grpc, monkeypatch)

    assert [store.check(), store.check()] == ["3.5.1", "3.5.2"]
    assert (grpc.is_closed, gateway.is_closed) == (False, True)
