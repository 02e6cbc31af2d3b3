"""agent.session.store_client: the requests of an agent to its store, and the events that the answers become."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from elaunch.agent.core.events import (
    Committed,
    Leased,
    LeaseLost,
    SnapshotChanged,
    SnapshotPending,
    StoreEvent,
    StoreLost,
    Tag,
)
from elaunch.agent.session.session import RetryQueue
from elaunch.agent.session.store_client import StoreClient
from elaunch.agent.session.store_view import JobStore, LocalHost
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot
from elaunch.rendezvous.rules.transactions import run_lease, start_run
from elaunch.rendezvous.store import (
    Absent,
    Changes,
    Denied,
    KeyEntry,
    LeaseGone,
    Op,
    Put,
    Rejected,
    StoreError,
    Txn,
    Unavailable,
    View,
)
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Generation, Node, OpenKind, Terms
from tests.unit.rendezvous.flaky_store import FlakyStore

KEYS = Keys("job")
TIMES = Times()
NODE = Node("node-b-00000001", "node-b", "10.0.0.2", 1)
AWAY = Unavailable("10.0.0.9:2379 refuses connections")


class Bench:
    """A client with a store that fails as the test says, and the client's events."""

    def __init__(self, *, remote: bool = True, times: Times = TIMES) -> None:
        self.store = FlakyStore()
        self.events: list[StoreEvent] = []
        self.pending = 0
        self.now_s = 100.0
        self.dead: set[str] = set()
        self.client = StoreClient(
            JobStore(self.store, KEYS, remote),
            LocalHost("node-a", random.Random(1).getrandbits, lambda name: name in self.dead, lambda: self.now_s),
            times,
            self._post,
        )
        self.view = self.client.view
        self.requests = RetryQueue(self.client.renew, self.events.append, TIMES.backoff_max_s, lambda low, high: high)

    def begun(self) -> Bench:
        self.client.begin()
        return self

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot that the agent takes next, for which the client must have posted an event."""
        assert self.pending, "no event was posted"
        self.pending = 0
        snapshot_changed = self.client.view.snapshot()
        assert isinstance(snapshot_changed, SnapshotChanged), snapshot_changed
        return snapshot_changed.snapshot

    @property
    def leased(self) -> list[Leased]:
        return [event for event in self.events if isinstance(event, Leased)]

    def write(self, *ops: Op) -> int:
        """Write as another client. Returns the revision."""
        return self.store.write(Txn((), ops)).revision

    def open(self, number: int) -> int:
        return self.write(Put(KEYS.generation, encode(Generation(number, OpenKind.FAIL, "rank 9 failed"))))

    def put(self, key: str) -> Txn:
        """A transaction that puts the key on this node's lease."""
        return Txn((), (Put(key, "mine", self.leased[-1].lease),))

    def _post(self, event: StoreEvent | SnapshotPending) -> None:
        if isinstance(event, SnapshotPending):
            self.pending += 1
        else:
            self.events.append(event)


@pytest.fixture
def bench() -> Bench:
    """A client that has begun."""
    return Bench().begun()


def number(snapshot: Snapshot) -> int | None:
    return snapshot.generation.number if snapshot.generation else None


# --- the beginning


@pytest.mark.parametrize("why", [Denied("no such page"), AWAY], ids=["denied", "away"])
def test_a_store_that_does_not_take_the_first_read_is_checked(why: StoreError) -> None:
    bench = Bench()
    bench.store.fail("read", why)
    bench.store.fail("check", Denied("a:1 is etcd 3.2; elaunch needs 3.4 or later"))

    with pytest.raises(Denied, match=r"etcd 3\.2"):
        bench.client.begin()


@pytest.mark.parametrize("remote", [False, True])
def test_a_store_elsewhere_is_watched_narrowly_and_one_in_this_process_whole(remote: bool) -> None:
    bench = Bench(remote=remote)
    bench.write(Put(KEYS.member(NODE.node_id), encode(NODE)))

    snapshot = bench.begun().snapshot

    assert (snapshot.whole, bool(snapshot.members)) == (not remote, not remote)


@pytest.mark.parametrize("method", ["check", "grant", "watch", "begun"])
def test_a_beginning_that_broke_off_is_made_again_from_its_start(method: str) -> None:
    bench = Bench()
    bench.open(3)
    bench.store.fail("watch", Denied("the gateway is off"))
    bench.store.fail(method, AWAY)

    with pytest.raises(Unavailable):
        bench.client.begin()
    bench.client.begin()

    assert number(bench.snapshot) == 3
    bench.write(Put(KEYS.leader, "x"))
    assert bench.pending == 1, "one watch reports it"
    assert bench.store.memory.keep_alive(bench.leased[-1].lease)


def member(host: str, process: str) -> Node:
    return replace(NODE, node_id=f"{host}-00000009", host=host, process=process)


def with_last_life() -> Bench:
    """An agent that was started again while the keys of its last life still exist."""
    bench = Bench().begun()
    bench.store.memory.grant(5, 3)
    old = member("node-a", "boot:1:17")
    bench.write(Put(KEYS.member(old.node_id), encode(old), 5), Put(KEYS.leader, old.node_id, 5))
    bench.dead = {"boot:1:17"}
    return bench


def test_a_run_is_begun_once_the_lease_of_the_agents_last_life_is_ended() -> None:
    bench = with_last_life()

    bench.client.commit(Txn((Absent(KEYS.leader),), bench.put(KEYS.done(0, "me")).then), Tag.RUN)

    assert bench.events[-1] == Committed(Tag.RUN, True, bench.store.memory.engine.revision)
    assert bench.store.memory.keep_alive(5) == 0
    assert bench.snapshot.leader == ""


def test_a_join_that_was_decided_with_the_agents_last_life_in_sight_is_decided_again() -> None:
    bench = with_last_life()
    entry = bench.put(KEYS.member("me"))

    bench.client.commit(entry, Tag.JOIN)
    refused, leader = bench.events[-1], bench.snapshot.leader
    bench.client.commit(entry, Tag.JOIN)

    assert isinstance(refused, Committed)
    assert (refused.held, leader) == (False, "")
    assert bench.events[-1] == Committed(Tag.JOIN, True, bench.store.memory.engine.revision)
    assert bench.store.memory.keep_alive(5) == 0


def test_the_lease_of_an_agent_that_lives_or_of_another_host_is_left_alone(bench: Bench) -> None:
    for lease, other in enumerate((member("node-a", "alive"), member("node-ab", "dead"), NODE), start=5):
        bench.store.memory.grant(lease, 3)
        bench.write(Put(KEYS.member(other.node_id), encode(other), lease))
    bench.dead = {"dead"}

    bench.client.commit(bench.put(KEYS.done(0, "me")), Tag.JOIN)

    assert [bench.store.memory.keep_alive(lease) for lease in (5, 6, 7)] == [3, 3, 3]
    assert bench.events[-1] == Committed(Tag.JOIN, True, bench.store.memory.engine.revision)


@pytest.mark.parametrize("breaks_at", ["commit", "read", "revoke"])
def test_an_entry_that_broke_off_is_made_again(breaks_at: str) -> None:
    bench = with_last_life()
    bench.store.lose(breaks_at, AWAY)
    entry = bench.put(KEYS.member("me"))

    with pytest.raises(Unavailable):
        bench.client.commit(entry, Tag.JOIN)
    for _ in range(2):
        bench.client.commit(entry, Tag.JOIN)

    assert bench.events[-1] == Committed(Tag.JOIN, True, bench.store.memory.engine.revision)
    assert bench.store.memory.keep_alive(5) == 0


# --- what is seen


def test_many_changes_make_one_event(bench: Bench) -> None:
    assert number(bench.snapshot) is None

    for change in range(100):
        bench.open(change)

    assert bench.pending == 1
    assert number(bench.snapshot) == 99
    bench.open(100)
    assert bench.pending == 1


def test_snapshots_never_go_back(bench: Bench) -> None:
    bench.open(1)
    revision = bench.open(2)
    epoch = bench.view._epoch
    stale = KeyEntry(encode(Generation(1, OpenKind.FAIL, "x")), 2, 2)

    bench.view._updated(epoch, Changes(revision - 1, {KEYS.generation: stale}))
    bench.view._updated(epoch, View(revision - 1, {KEYS.generation: stale}))

    assert number(bench.snapshot) == 2


def test_a_record_that_is_none_ends_the_session_with_its_key(bench: Bench) -> None:
    bench.write(Put(KEYS.generation, "garbage"))

    lost = bench.client.view.snapshot()

    assert isinstance(lost, StoreLost)
    assert lost.why.startswith(f"{KEYS.generation} in the store is not a Generation: 'garbage'")


def test_a_watch_that_is_denied_ends_no_training_and_is_begun_again_with_the_next_read(bench: Bench) -> None:
    watches = bench.store.calls["watch"]

    bench.view._updated(bench.view._epoch, Denied("permission denied"))
    posted = list(bench.events)
    bench.store.fail("read", Denied("permission denied"))
    with pytest.raises(Denied):
        bench.view.repair(lambda: bench.now_s)
    bench.view.repair(lambda: bench.now_s)

    assert not any(isinstance(event, StoreLost) for event in posted)
    assert bench.store.calls["watch"] == watches + 1


def test_after_a_slow_read_the_next_one_is_as_far_away_as_after_a_fast_one(bench: Bench) -> None:
    bench.store.deaf = True
    bench.open(1)
    bench.now_s += TIMES.lease_ttl_s
    reads = bench.store.calls["read"]

    def take_long() -> None:
        bench.now_s += TIMES.lease_ttl_s

    bench.store.between = take_long
    for _ in range(2):
        bench.view.repair(lambda: bench.now_s)

    assert number(bench.snapshot) == 1
    assert bench.store.calls["read"] == reads + 1
    assert bench.now_s < bench.view._reread_due_s


def test_the_runs_lease_is_renewed_by_its_leader_though_the_store_takes_no_writes() -> None:
    times = replace(TIMES, keys_ttl_s=TIMES.keys_ttl_min_s)
    bench = Bench(times=times)
    bench.store.memory.advance(bench.now_s)
    bench.begun()
    own = bench.leased[-1]
    bench.client.commit(start_run(bench.snapshot, Terms(), replace(NODE, node_id=own.node_id), own.lease), Tag.RUN)
    bench.client.view.widen()

    def full() -> None:
        raise Rejected("etcd is full")

    bench.requests.add(full)
    end_s = bench.now_s + 2 * times.keys_ttl_s
    while bench.now_s < end_s:
        bench.now_s += times.keepalive_s
        bench.store.memory.advance(bench.now_s)
        if bench.client.tick(bench.now_s):
            bench.requests.add_renewal()
        for _ in range(4):
            bench.requests.do_next(0.5)

    assert {KEYS.leader, KEYS.spec, KEYS.generation} <= set(bench.store.memory.read(KEYS.root).entries)


# --- transactions


def test_an_opening_whose_lease_the_store_denies_is_reported_and_retried(bench: Bench) -> None:
    """An opening has no tag. If it were dropped, its node would wait for a generation that no node opens."""
    own = bench.leased[-1]
    run = start_run(bench.snapshot, Terms(), replace(NODE, node_id=own.node_id), own.lease)
    bench.client.commit(run, Tag.RUN)
    opening = Txn((), (bench.snapshot.put(KEYS.generation, encode(Generation(1, OpenKind.FAIL, "x"))),))
    bench.store.fail("commit", LeaseGone("the lease has ended"))

    with pytest.raises(Rejected, match="the lease has ended, and the job's keys are attached to it"):
        bench.client.commit(opening, None)
    bench.client.commit(opening, None)

    written = bench.store.memory.read(KEYS.generation).entries[KEYS.generation].value
    assert not any(isinstance(event, LeaseLost) for event in bench.events)
    assert decode(Generation, written).number == 1


def test_before_a_refusal_is_posted_its_reason_can_be_seen(bench: Bench) -> None:
    bench.store.deaf = True
    bench.write(Put(KEYS.leader, "x"))
    seen: list[int] = []
    post = bench.events.append
    bench.client._post = lambda event: (seen.append(bench.snapshot.revision), post(event))[1]

    bench.client.commit(Txn((Absent(KEYS.leader),), (Put(KEYS.leader, "mine"),)), Tag.ELECT)

    assert seen == [bench.store.memory.engine.revision]
    assert bench.events[-1] == Committed(Tag.ELECT, False, bench.store.memory.engine.revision)


@pytest.mark.parametrize("tag", [None, Tag.JOIN])
def test_a_write_with_a_lease_that_has_ended_is_refused_and_the_lease_lost(bench: Bench, tag: Tag | None) -> None:
    lease = bench.leased[0].lease
    bench.store.memory.revoke(lease)

    bench.client.commit(bench.put(KEYS.member("x")), tag)

    refused = [Committed(tag, False, 0)] if tag else []
    assert bench.events[1:] == [*refused, LeaseLost(lease)]
    assert bench.client.due_s is None


# --- the lease


def test_a_lease_is_renewed_each_keepalive_and_once_a_lease_time_what_is_seen_is_compared(bench: Bench) -> None:
    compared = bench.store.calls["commit"]

    for _ in range(12):
        bench.now_s = bench.client.due_s or 0.0
        assert bench.client.tick(bench.now_s)
        bench.requests.add_renewal()
        while bench.requests.has_any:
            bench.requests.do_next(0.0)

    took_s = bench.now_s - 100.0
    assert bench.store.calls["keep_alive"] == 12 == round(took_s / TIMES.keepalive_s)
    assert bench.store.calls["commit"] - compared == took_s // TIMES.lease_ttl_s


# --- the run's lease


def started(*, remote: bool = True) -> tuple[Bench, int]:
    """The run is started by this client; its lease."""
    bench = Bench(remote=remote)
    bench.store.memory.advance(bench.now_s)
    snapshot, own = bench.begun().snapshot, bench.leased[-1]
    me = replace(NODE, node_id=own.node_id, host="node-a")
    bench.client.commit(start_run(snapshot, Terms(), me, own.lease), Tag.RUN)
    return bench, bench.store.memory.read(KEYS.spec).entries[KEYS.spec].lease


@pytest.mark.parametrize("remote", [False, True])
def test_who_starts_a_run_begins_the_lease_on_which_its_keys_stand(remote: bool) -> None:
    bench, lease = started(remote=remote)

    assert Committed(Tag.RUN, True, bench.store.memory.engine.revision) in bench.events
    assert bench.store.memory.keep_alive(lease) == TIMES.keys_ttl_s
    assert bench.snapshot.lease == lease
    assert lease not in [leased.lease for leased in bench.leased]


def test_who_starts_a_run_after_its_own_lease_has_ended_is_notified_and_leaves_no_lease(bench: Bench) -> None:
    own = bench.leased[-1]
    bench.store.memory.revoke(own.lease)
    txn = start_run(bench.snapshot, Terms(), replace(NODE, node_id=own.node_id), own.lease)

    bench.client.commit(txn, Tag.RUN)

    assert bench.events[-2:] == [Committed(Tag.RUN, False, 0), LeaseLost(own.lease)]
    assert not bench.store.memory.read(KEYS.root).entries
    assert bench.store.memory.keep_alive(run_lease(KEYS, txn)) == 0


def test_a_start_that_was_done_and_whose_answer_was_lost_keeps_its_lease(bench: Bench) -> None:
    own = bench.leased[-1]
    txn = start_run(bench.snapshot, Terms(), replace(NODE, node_id=own.node_id), own.lease)
    bench.store.lose("commit", AWAY)

    with pytest.raises(Unavailable):
        bench.client.commit(txn, Tag.RUN)
    bench.client.commit(txn, Tag.RUN)

    assert bench.store.memory.keep_alive(run_lease(KEYS, txn)) == TIMES.keys_ttl_s
    assert KEYS.spec in bench.store.memory.read(KEYS.spec).entries


@pytest.mark.parametrize(("renewed_s", "later_s"), [(0.0, 1.6), (0.8, 0.8)])
def test_a_lease_that_the_store_wrongly_calls_ended_is_ended_before_this_node_enters_again(
    bench: Bench, renewed_s: float, later_s: float
) -> None:
    """History (a proxy that says "lease not found"): the node was seated twice, once under its former name."""
    first = bench.leased[-1]
    bench.client.commit(bench.put(KEYS.member("node-a-00000001")), Tag.RETURN)
    if renewed_s:
        bench.now_s += renewed_s
        bench.client.renew()
    bench.now_s += later_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.store, "keep_alive", lambda _lease: 0.0)
        bench.client.renew()

    lost = bench.events[-1]
    assert isinstance(lost, LeaseLost)
    assert lost.lease == first.lease
    bench.client.new_lease()
    # The node may still come back under the same name, on the new lease.
    assert bench.store.memory.keep_alive(first.lease)
    bench.client.commit(bench.put(KEYS.member("node-a-00000002")), Tag.JOIN)

    assert not bench.store.memory.keep_alive(first.lease)
    assert set(bench.store.memory.read(KEYS.members).entries) == {KEYS.member("node-a-00000002")}
