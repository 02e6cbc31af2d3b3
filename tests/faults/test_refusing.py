"""The fault proxy itself: its answers are those of a real etcd, and it passes requests on unchanged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.etcd.json_transport import JsonTransport
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import EtcdError, Rpc
from elaunch.rendezvous.store import Changes, Put, Rejected, StoreError, TimedOut, Txn, Unavailable, Update
from tests.etcd import Etcd, client
from tests.faults.answers import (
    ALL,
    BAD_GATEWAY,
    GRPC_ERRORS,
    NO_LEADER,
    SPACE_EXCEEDED,
    TOO_LARGE,
    Fault,
    GrpcError,
    fits,
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


@pytest.mark.parametrize("answer", [each for each in ALL if fits(each, Rpc.TXN)], ids=str)
def test_no_answer_of_the_table_passes_for_a_good_one(
    store: EtcdStore, hasty: EtcdStore, proxy: Refusing, answer: object
) -> None:
    asked = hasty if answer in SLOW else store
    # This call may time out too. No connection is kept then.
    with suppress(TimedOut):
        put(asked, "/a")
    # If a kept connection ends, the client tries once more.
    proxy.refuse(Rpc.TXN, answer)  # type: ignore[arg-type]

    with pytest.raises(StoreError):
        put(asked, "/a")

    proxy.wait_until_struck(1, Rpc.TXN)
    proxy.heal()


def test_only_what_was_named_is_refused_and_only_so_often(store: EtcdStore, proxy: Refusing) -> None:
    over = threading.Event()
    proxy.refuse(Rpc.TXN, NO_LEADER, prefix="/refused/", times=2)
    proxy.refuse(Rpc.RANGE, BAD_GATEWAY, until=over)

    put(store, "/other/a")
    for _ in range(2):
        with pytest.raises(Unavailable, match="no leader"):
            put(store, "/refused/a")
    put(store, "/refused/a")

    with pytest.raises(Rejected, match="502"):
        store.read("/refused/")
    over.set()
    assert store.read("/refused/").entries
    assert [str(s.answer) for s in proxy.struck] == [str(NO_LEADER), str(NO_LEADER), str(BAD_GATEWAY)]


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


def test_a_hang_ends_when_it_is_healed(store: EtcdStore, hasty: EtcdStore, proxy: Refusing) -> None:
    proxy.refuse(None, Fault.HANG)
    with pytest.raises(TimedOut):
        hasty.read("/")

    proxy.heal()

    store.read("/")


@pytest.mark.parametrize("fault", [Fault.STREAM_ENDS, Fault.STREAM_ERROR, NO_LEADER, SPACE_EXCEEDED, BAD_GATEWAY])
def test_a_watch_that_is_ended_goes_on_where_it_was(store: EtcdStore, proxy: Refusing, fault: object) -> None:
    told: list[Update] = []
    proxy.refuse(Rpc.WATCH, fault, times=2)  # type: ignore[arg-type]

    watch = store.watch("/watched/", store.read("/").revision, told.append)
    put(store, "/watched/a")

    wait_for(lambda: any(isinstance(each, Changes) for each in told), "word of the write")
    proxy.wait_until_struck(2, Rpc.WATCH)
    watch.close()


@pytest.mark.parametrize("answer", [a for a in GRPC_ERRORS if a.code in (3, 7, 12, 16)], ids=str)
def test_a_first_watch_that_is_denied_says_by_which_store_in_a_sentence(
    store: EtcdStore, proxy: Refusing, answer: GrpcError
) -> None:
    proxy.refuse(Rpc.WATCH, answer)

    with pytest.raises(StoreError) as denied:
        store.watch("a", None, lambda _: None).begun()

    assert str(proxy.endpoint) in str(denied.value)
    assert "rpc error" not in str(denied.value)


def test_a_deaf_watch_tells_nothing(store: EtcdStore, proxy: Refusing) -> None:
    deaf: list[Update] = []
    hearing: list[Update] = []
    proxy.refuse(Rpc.WATCH, Fault.STREAM_DEAF, times=1)
    after = store.read("/").revision
    first = store.watch("/watched/", after, deaf.append)
    proxy.wait_until_struck()
    second = store.watch("/watched/", after, hearing.append)

    put(store, "/watched/b")

    wait_for(lambda: hearing, "word of the write")
    assert not deaf
    first.close()
    second.close()


def test_the_dice_of_a_seed_are_the_same_again(etcd: Etcd) -> None:
    thrown = []
    for _ in range(2):
        with Refusing(etcd) as proxy:
            proxy.chaos(4711, 0.5, GRPC_ERRORS)
            transport = JsonTransport()
            for _ in range(50):
                try:
                    transport.call(proxy.endpoint, Rpc.RANGE, {"key": "YQ=="}, "", DEADLINE_S)
                except EtcdError:
                    continue
            transport.close()
            thrown.append([str(s.answer) for s in proxy.struck])
    assert thrown[0] == thrown[1]
    assert 10 < len(thrown[0]) < 40


def test_what_is_asked_in_vain_is_known_until_it_is_answered(store: EtcdStore, proxy: Refusing) -> None:
    proxy.refuse(Rpc.TXN, SPACE_EXCEEDED)
    for _ in range(3):
        with pytest.raises(StoreError):
            put(store, "/a")
        store.read("/")

    ((rpc, _),) = proxy.waiting.now(patience_s=DEADLINE_S)
    assert rpc is Rpc.TXN

    proxy.heal()
    put(store, "/a")
    assert not proxy.waiting.now(patience_s=DEADLINE_S)
