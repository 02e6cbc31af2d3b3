"""The fault proxy itself: its answers are those of a real etcd, and it passes requests on unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.etcd.json_transport import JsonTransport
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import EtcdError, Rpc
from elaunch.rendezvous.store import Put, Txn, Unavailable
from tests.etcd import Etcd, client
from tests.faults.answers import (
    GRPC_ERRORS,
    TOO_LARGE,
    Fault,
)
from tests.faults.refusing import Refusing
from tests.harness import DEADLINE_S, wait_for

REQUESTS = {Rpc.RANGE: {"key": "YQ=="}, Rpc.TXN: {}, Rpc.KEEP_ALIVE: {"ID": "7"}, Rpc.STATUS: {}}


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd("3.5") as started:
        yield started


@pytest.fixture
def proxy(etcd: Etcd) -> Iterator[Refusing]:
    with Refusing(etcd) as running:
        yield running


# With these answers a client waits until its deadline is over.
SLOW = (Fault.HANG, Fault.UNANSWERED, Fault.DRIP)


@pytest.fixture
def store(proxy: Refusing) -> Iterator[EtcdStore]:
    """A store that waits as long as a busy machine needs."""
    with closing(client([proxy.endpoint], deadline_s=DEADLINE_S)) as made:
        yield made


@pytest.fixture
def hasty(proxy: Refusing) -> Iterator[EtcdStore]:
    """A store that waits for a second."""
    with closing(client([proxy.endpoint])) as made:
        yield made


def put(store: EtcdStore, key: str, value: str = "x") -> None:
    assert store.commit(Txn((), (Put(key, value),))).held


@pytest.mark.parametrize("version", ["3.4", "3.5"])
def test_an_error_has_the_form_that_a_real_gateway_gives_it(version: str) -> None:
    too_large = {"success": [{"request_put": {"key": "YQ==", "value": "AAAA" * 600_000}}]}
    with Etcd(version) as etcd, Refusing(etcd) as proxy:
        transport = JsonTransport()

        def refused(endpoint: Endpoint) -> tuple[int, str]:
            with pytest.raises(EtcdError) as error:
                transport.call(endpoint, Rpc.TXN, too_large, "", DEADLINE_S)
            return error.value.code, error.value.text

        real = refused(etcd.addresses[0])
        assert refused(proxy.endpoint) == real
        proxy.refuse(Rpc.TXN, TOO_LARGE, times=1)
        assert refused(proxy.endpoint) == real == (TOO_LARGE.code, TOO_LARGE.text)
        assert len(proxy.struck) == 1
        transport.close()


@pytest.mark.parametrize("rpc", REQUESTS)
def test_every_error_of_etcd_is_read_as_its_code_and_text(proxy: Refusing, rpc: Rpc) -> None:
    transport = JsonTransport()
    for answer in GRPC_ERRORS:
        rule = proxy.refuse(rpc, answer, times=1)

        with pytest.raises(EtcdError) as error:
            transport.call(proxy.endpoint, rpc, REQUESTS[rpc], "", DEADLINE_S)

        assert (error.value.code, error.value.text) == (answer.code, answer.text)
        assert rule.left == 0
    transport.close()


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.UNANSWERED, Fault.CUT])
def test_a_write_whose_answer_is_lost_has_landed(
    etcd: Etcd, store: EtcdStore, hasty: EtcdStore, proxy: Refusing, fault: Fault
) -> None:
    proxy.refuse(Rpc.TXN, fault, prefix=f"/{fault}/")

    with pytest.raises(Unavailable):
        put(hasty if fault in SLOW else store, f"/{fault}/a")

    # Whoever was hasty may have given up before the write was there.
    wait_for(lambda: f"/{fault}/a" in etcd.ctl("get", f"/{fault}/a"), "the write", every_s=0.2)
    proxy.heal()
