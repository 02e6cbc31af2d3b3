"""The store's client on three members of etcd, while they are killed, stopped and restarted one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from elaunch.rendezvous.etcd.json_codec import range_end
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.store import Delete, HistoryLost, Put, Txn, Unavailable, Update
from tests.etcd import TRANSPORTS, VERSIONS, Etcd, Member, answered, client
from tests.faults.etcd_traffic import LEASE, PREFIX, Traffic
from tests.harness import slow, wait_for

PAIRS = [(version, transport) for version in VERSIONS for transport in TRANSPORTS]


def by(chosen: tuple[str, str]) -> pytest.MarkDecorator:
    """The test runs with this pair of a version and a transport, and among the slow ones with the others."""
    others = [slow(*pair) for pair in PAIRS if pair != chosen]
    return pytest.mark.parametrize(("cluster", "transport"), [chosen, *others], indirect=True)


# One test after the other, so that each pair sees half of the faults.
by_gateway, by_grpc = by((VERSIONS[0], "gateway")), by((VERSIONS[-1], "grpc"))


@pytest.fixture(scope="module", params=VERSIONS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Etcd]:
    with Etcd(request.param, members=3) as cluster:
        yield cluster


@pytest.fixture
def etcd(cluster: Etcd) -> Etcd:
    """An etcd whose members all run, without keys of an earlier test."""
    for member in cluster.members:
        member.revive()
    cluster.leader()
    with closing(EtcdStore(cluster.addresses, deadline_s=10)) as store:
        answered(lambda: store.revoke(LEASE))
        answered(lambda: store.commit(Txn((), (Delete(PREFIX, range_end(PREFIX).decode()),))))
    return cluster


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "gateway"))


@pytest.fixture
def store(etcd: Etcd, transport: str) -> Iterator[EtcdStore]:
    with closing(client(etcd.addresses, transport)) as store:
        yield store


@pytest.fixture
def fresh(etcd: Etcd) -> Iterator[EtcdStore]:
    with closing(EtcdStore(etcd.addresses, deadline_s=10)) as store:
        yield store


def at_first(etcd: Etcd, member: Member, transport: str) -> closing[EtcdStore]:
    """A store that talks to `member` as long as that answers."""
    order = sorted(range(len(etcd.members)), key=lambda i: etcd.members[i] is not member)
    return closing(client([etcd.addresses[i] for i in order], transport))


@by_grpc
def test_a_member_that_hangs_is_left_by_calls_and_watches(etcd: Etcd, transport: str, fresh: EtcdStore) -> None:
    # This member is not the leader, so only this connection fails.
    member = next(member for member in etcd.members if member is not etcd.leader())
    with at_first(etcd, member, transport) as store, Traffic(store) as traffic:
        member.stop()
        traffic.wait_for_writes(20)

        traffic.wait_until_told()
        member.go_on()
        traffic.wait_for_writes(20)
    traffic.assert_nothing_was_lost_or_repeated(fresh)
    traffic.assert_the_lease_is_kept()
    assert max(traffic.gaps_s) > 0.4, "the call to the stopped member must have run into its deadline"


@by_grpc
def test_without_a_majority_calls_fail_in_words_and_go_on_when_it_is_back(
    etcd: Etcd, store: EtcdStore, fresh: EtcdStore
) -> None:
    with Traffic(store) as traffic:
        for member in etcd.members[:2]:
            member.stop()
        failed = len(traffic.unavailable)
        wait_for(lambda: len(traffic.unavailable) >= failed + 3, "calls that fail")

        for member in etcd.members[:2]:
            member.go_on()
        traffic.wait_for_writes(20)
    traffic.assert_nothing_was_lost_or_repeated(fresh)
    traffic.assert_the_lease_is_kept()
    assert all(member.endpoint in traffic.unavailable[failed + 1] for member in etcd.members)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_store_whose_revision_went_back_has_lost_its_history(version: str) -> None:
    told: list[Update] = []
    with Etcd(version) as etcd:
        store = EtcdStore(etcd.addresses)
        port = etcd.addresses[0].port
        for _ in range(5):
            store.commit(Txn((), (Put(f"{PREFIX}n", ""),)))
        store.watch(PREFIX, store.read(PREFIX).revision, told.append)
        peer_port = int(etcd.peers[0].rpartition(":")[2])
    with pytest.raises(Unavailable, match="nobody listens"):
        store.read(PREFIX)

    with Etcd(version, ports=[port, peer_port]), pytest.raises(HistoryLost, match="revision 6 before, revision 1 now"):
        store.read(PREFIX)

    wait_for(lambda: told, "the watch's end")
    assert [type(update) for update in told] == [HistoryLost]
    with pytest.raises(HistoryLost):
        store.commit(Txn(()))
    store.close()
