"""A watch of the store's client, while its connection breaks, its history is compacted, and its host fails."""

from __future__ import annotations

import itertools
import random
import select
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elaunch.rendezvous.etcd import store as store_module
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.store import Changes, Delete, HistoryLost, KeyEntry, Put, Txn, Unavailable, Update, View
from tests.etcd import TRANSPORTS, VERSIONS, Etcd, client
from tests.harness import DEADLINE_S, slow, wait_for
from tests.nodes import Nodes, needs_nodes
from tests.relay import Listener, relay, silent

PREFIX = "/elaunch/watch/"
A, B = f"{PREFIX}a", f"{PREFIX}b"


# Each version and each transport once; the slow suite has all pairs.
PAIRS = list(zip(VERSIONS, TRANSPORTS, strict=True))
OTHERS = [pair for pair in itertools.product(VERSIONS, TRANSPORTS) if pair not in PAIRS]


@pytest.fixture(scope="module", params=[*PAIRS, *map(slow, OTHERS)], ids="-".join)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A version of etcd, and the transport of the client that watches."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def etcd(pair: tuple[str, str]) -> Iterator[Etcd]:
    with Etcd(pair[0]) as server:
        yield server


@pytest.fixture
def transport(pair: tuple[str, str]) -> str:
    return pair[1]


@pytest.fixture
def way(etcd: Etcd) -> Iterator[Listener]:
    """The relay between the watching client and etcd."""
    with relay(etcd.addresses[0]) as listener:
        yield listener


@pytest.fixture
def watching(way: Listener, transport: str) -> Iterator[EtcdStore]:
    with closing(client([way.endpoint], transport, deadline_s=10)) as store:
        yield store


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No watch begins again because etcd is slow to confirm that it has begun."""
    monkeypatch.setattr(store_module, "_BEGUN_S", DEADLINE_S)


@pytest.fixture
def direct(etcd: Etcd) -> Iterator[EtcdStore]:
    with closing(EtcdStore(etcd.addresses, deadline_s=DEADLINE_S)) as store:
        store.commit(Txn((), (Delete(PREFIX, PREFIX[:-1] + "0"),)))
        yield store


def put(store: EtcdStore, key: str, value: str = "") -> int:
    return store.commit(Txn((), (Put(key, value),))).revision


class Received:
    """The events of a watch, and the state that a reader derives from them."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.entries: dict[str, KeyEntry] = {}
        self.revision = 0

    def __call__(self, update: Update) -> None:
        self.updates.append(update)
        assert isinstance(update, Changes | View)
        assert update.revision > self.revision
        if isinstance(update, View):
            self.entries = dict(update.entries)
        for key, entry in update.entries.items():
            if entry:
                self.entries[key] = entry
            else:
                del self.entries[key]
        self.revision = update.revision

    def wait_for(self, revision: int) -> None:
        wait_for(lambda: self.revision >= revision, f"revision {revision}; received {self.updates[-3:]}")


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_cuts_and_compactions_at_random_leave_a_reader_with_the_truth(
    etcd: Etcd, watching: EtcdStore, direct: EtcdStore, way: Listener, seed: int
) -> None:
    rng = random.Random(seed)
    received = Received()
    watching.watch(PREFIX, direct.read(PREFIX).revision, received)

    revision = compacted = 0
    for turn in range(60):
        keys = rng.sample(range(5), 2)
        ops = (Put(f"{PREFIX}{keys[0]}", str(turn)), Delete(f"{PREFIX}{keys[1]}"))
        revision = direct.commit(Txn((), ops)).revision
        match rng.randrange(12):
            case 0 | 1:
                way.hang_up()
            case 2:
                way.cut()
            case 3 | 4:
                way.restore()
            case 5:
                compacted = rng.randint(max(compacted + 1, revision - 3), revision)
                etcd.compact(compacted)
            case 6:
                way.restore()
                received.wait_for(revision)
    way.restore()
    received.wait_for(revision)

    assert received.entries == direct.read(PREFIX).entries, f"seed {seed}"


@pytest.mark.parametrize("begins_now", [False, True])
def test_a_watch_goes_on_from_a_member_that_never_answers_to_one_that_does(
    etcd: Etcd, direct: EtcdStore, transport: str, begins_now: bool
) -> None:
    received, before = Received(), direct.read(PREFIX).revision
    with silent() as mute, closing(client([mute.endpoint, *etcd.addresses], transport, deadline_s=0.7)) as store:
        store.watch(PREFIX, None if begins_now else before, received)

        received.wait_for(put(direct, A))
        assert mute.accepted


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("moment", ["open", "read"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_watch_from_now_misses_nothing_that_is_written_while_it_begins(
    etcd: Etcd, direct: EtcdStore, moment: str, side: str
) -> None:
    """A write may come before or after the stream opens, and before or after the first read."""

    class Interrupted(EtcdStore):
        pass

    def interrupted(self: EtcdStore, *args: Any) -> Any:
        if side == "before":
            written.append(put(direct, A))
        answer = getattr(EtcdStore, moment)(self, *args)
        if side == "after":
            written.append(put(direct, A))
        return answer

    setattr(Interrupted, moment, interrupted)
    written: list[int] = []
    received = Received()
    with closing(Interrupted(etcd.addresses, deadline_s=DEADLINE_S)) as store:
        store.watch(PREFIX, None, received).begun()

        received.wait_for(written[-1])
        assert received.entries == direct.read(PREFIX).entries
        assert [A in update.entries for update in received.updates].count(True) == 1, "received once"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_store_whose_revision_went_back_has_lost_its_history(version: str) -> None:
    received: list[Update] = []
    with Etcd(version) as etcd:
        store = EtcdStore(etcd.addresses)
        port = etcd.addresses[0].port
        for _ in range(5):
            store.commit(Txn((), (Put(f"{PREFIX}n", ""),)))
        store.watch(PREFIX, store.read(PREFIX).revision, received.append)
        peer_port = int(etcd.peers[0].rpartition(":")[2])
    with pytest.raises(Unavailable, match="nothing listens"):
        store.read(PREFIX)

    with Etcd(version, ports=[port, peer_port]), pytest.raises(HistoryLost, match="revision 6 before, revision 1 now"):
        store.read(PREFIX)

    wait_for(lambda: received, "the watch's end")
    assert [type(update) for update in received] == [HistoryLost]
    with pytest.raises(HistoryLost):
        store.commit(Txn(()))
    store.close()


WATCHING = """
import sys
from elaunch.rendezvous.endpoint import Endpoint
from tests.etcd import client

store = client([Endpoint("node0", 2379)], sys.argv[1], deadline_s=60)
store.watch("/elaunch/", store.read("/elaunch/").revision, lambda update: print(*update.entries, flush=True))
print("watching", flush=True)
sys.stdin.read()
"""


@needs_nodes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_idle_watch_notices_that_its_servers_host_was_switched_off(tmp_path: Path, transport: str) -> None:
    with (
        Nodes(2) as (host, other),
        Etcd(hosts=[host.ipv4], ports=[2379, 2380], prefix=lambda _: host.prefix, folder=tmp_path) as etcd,
    ):
        watching = other.popen(sys.executable, "-u", "-c", WATCHING, transport, stdin=-1, stdout=-1)
        assert watching.stdout
        assert watching.stdout.readline() == "watching\n"
        etcd.ctl("put", "/elaunch/before", "")
        assert watching.stdout.readline() == "/elaunch/before\n"

        # No packet ends the connection, and its other end does not exist any more.
        host.power_off()
        etcd.members[0].kill()
        host.power_on()
        etcd.members[0].start()
        etcd.members[0].wait_ready()
        etcd.ctl("put", "/elaunch/after", "")

        ready, _, _ = select.select([watching.stdout], [], [], DEADLINE_S)
        assert ready, "the watch waits for ever"
        assert watching.stdout.readline() == "/elaunch/after\n"
