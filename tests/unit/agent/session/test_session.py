"""agent.session.session: a thread of its own makes all requests in order, and repeats each until the store responds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from elaunch.agent.core.events import (
    Committed,
    Leased,
    SnapshotChanged,
    SnapshotPending,
    StoreBack,
    StoreEvent,
    StoreFailed,
    Tag,
    Trouble,
)
from elaunch.agent.session.session import FIRST_BACKOFF_S, LAST_TRIES, SLOW_BACKOFF_MAX_S, RetryQueue, Session
from elaunch.agent.session.store_view import JobStore, LocalHost
from elaunch.rendezvous.rules.snapshot import Keys
from elaunch.rendezvous.store import (
    Absent,
    Delete,
    Denied,
    HeadAway,
    OwnLimit,
    Put,
    Rejected,
    StoreError,
    TimedOut,
    Txn,
    TxnResponse,
    Unavailable,
)
from elaunch.rendezvous.times import Times
from tests.harness import DEADLINE_S, joined, wait_for
from tests.unit.rendezvous.flaky_store import FlakyStore

KEYS = Keys("job")
# Short enough for many tries, and with leases that no test outlives.
TIMES = replace(Times(), backoff_max_s=0.02, keepalive_s=0.01, lease_ttl_s=60)
FLUSH_S = DEADLINE_S
AWAY = Unavailable("no route")


class Bench:
    """A session with a store that fails as the test orders; `events` came by `post`."""

    def __init__(self, *, remote: bool, store: FlakyStore | None = None) -> None:
        self.store = store or FlakyStore()
        self.events: list[StoreEvent] = []
        self.pending = 0
        self.session = Session(JobStore(self.store, KEYS, remote), LocalHost("node-a"), TIMES, self._post)

    @property
    def lease(self) -> int:
        leased = [event for event in self.events if isinstance(event, Leased)]
        return leased[-1].lease

    def seen(self, kind: type[StoreEvent]) -> list[StoreEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type[StoreEvent], count: int = 1) -> StoreEvent:
        wait_for(lambda: len(self.seen(kind)) >= count, f"{count} times {kind.__name__}, {self.events}")
        return self.seen(kind)[count - 1]

    def put(self, number: int) -> Txn:
        """A write that can happen once."""
        return Txn((Absent(f"{KEYS.root}n/{number}"),), (Put(f"{KEYS.root}n/{number}", "x"),))

    @property
    def numbers(self) -> list[int]:
        """The numbers of the writes that happened, in the store's order."""
        entries = self.store.read(f"{KEYS.root}n/").entries
        by_age = sorted(entries, key=lambda key: entries[key].create_revision)
        return [int(key.rpartition("/")[2]) for key in by_age]

    def _post(self, event: StoreEvent | SnapshotPending) -> None:
        if isinstance(event, SnapshotPending):
            self.pending += 1
        else:
            self.events.append(event)


@contextmanager
def session(*, remote: bool = True, store: FlakyStore | None = None) -> Iterator[Bench]:
    bench = Bench(remote=remote, store=store)
    try:
        bench.session.open()
        yield bench
    finally:
        bench.store.down = ""
        bench.session.close(FLUSH_S)


# --- a store in this process


def test_a_store_in_this_process_serves_requests_in_the_callers_thread() -> None:
    before = set(threading.enumerate())
    with session(remote=False) as bench:
        assert bench.pending == 1
        snapshot_changed = bench.session.snapshot()
        bench.session.commit(bench.put(1), Tag.JOIN)

        assert bench.pending == 2
        assert set(threading.enumerate()) <= before
        assert bench.store.threads == {threading.current_thread().name}

    assert isinstance(snapshot_changed, SnapshotChanged)
    assert snapshot_changed.snapshot.whole
    assert [type(event) for event in bench.events] == [Leased, Committed]
    assert bench.store.closed


# --- a store elsewhere


class SlowStore(FlakyStore):
    """A store whose commits wait until the test lets them go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def commit(self, txn: Txn) -> TxnResponse:
        assert self.go.wait(FLUSH_S)
        return super().commit(txn)


def test_whoever_orders_never_waits_for_the_store() -> None:
    store = SlowStore()
    with session(store=store) as bench:
        bench.wait_for(Leased)

        for number in range(5):
            bench.session.commit(bench.put(number), Tag.JOIN)
        bench.session.widen()
        bench.session.tick(1e9)
        answered = len(bench.seen(Committed))
        store.go.set()
        bench.wait_for(Committed, 5)

    assert answered == 0


def test_a_lease_is_renewed_only_by_a_loop_that_lives() -> None:
    with session() as bench:
        bench.wait_for(StoreBack)
        due_s = bench.session.due_s
        assert due_s is not None
        bench.session.commit(bench.put(1), Tag.JOIN)
        bench.wait_for(Committed)
        untouched = bench.store.calls["keep_alive"]

        bench.session.tick(due_s - 0.001)
        bench.session.commit(bench.put(2), Tag.JOIN)
        bench.wait_for(Committed, 2)
        early = bench.store.calls["keep_alive"]
        bench.session.tick(due_s)
        wait_for(lambda: bench.store.calls["keep_alive"], "a renewal")

    assert (untouched, early) == (0, 0)


# --- the end


def test_pending_writes_are_flushed_and_the_lease_is_revoked() -> None:
    bench = Bench(remote=True)
    bench.session.open()
    bench.wait_for(StoreBack)
    mine = Txn((), (Put(KEYS.member("node-a-00000001"), "{}", bench.lease),))

    bench.session.commit(mine, None)
    for number in range(20):
        bench.session.commit(bench.put(number), None)
    bench.session.close(FLUSH_S)

    assert bench.numbers == list(range(20))
    assert not bench.store.read(KEYS.members).entries
    assert bench.store.calls["revoke"] == 1
    assert bench.store.closed
    assert bench.session.due_s is None


@pytest.mark.parametrize("others_go", [False, True])
def test_a_store_that_ends_with_this_agent_stays_for_the_other_members_but_not_for_ever(others_go: bool) -> None:
    bench = Bench(remote=True)
    bench.session.open()
    bench.wait_for(StoreBack)
    bench.store.write(Txn((), (Put(KEYS.member("node-b-00000001"), "{}"),)))
    closed = threading.Event()
    outlast_s = 1e6 if others_go else 0.05

    closing = threading.Thread(target=lambda: (bench.session.close(FLUSH_S, outlast_s), closed.set()))
    closing.start()
    if others_go:
        wait_for(lambda: bench.store.calls["revoke"], "its own lease to be given back")
        waited = not closed.is_set()
        bench.store.write(Txn((), (Delete(KEYS.member("node-b-00000001")),)))
        assert waited

    assert closed.wait(FLUSH_S)
    joined(closing)


# --- the queue: requests keep their order, and each is retried until the store responds

BACKOFF_MAX_S = 0.5


class QueueBench:
    """A queue whose requests fail as the test says. `done` are the requests that succeeded."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.tried: list[str] = []
        self.events: list[StoreEvent] = []
        self.failing: dict[str, list[StoreError]] = {}
        self.drawn: list[tuple[float, float]] = []
        self.requests = RetryQueue(self.request("renewal"), self.events.append, BACKOFF_MAX_S, self._uniform)

    def request(self, name: str, *failing: StoreError) -> Callable[[], None]:
        self.failing[name] = list(failing)

        def run() -> None:
            self.tried.append(name)
            if self.failing[name]:
                raise self.failing[name].pop(0)
            self.done.append(name)

        return run

    def run(self) -> list[float]:
        """Do all requests. Returns the pauses between tries."""
        pauses_s = [0.0]
        while self.requests.has_any:
            pauses_s.append(self.requests.do_next(pauses_s[-1]))
        return pauses_s[1:]

    def _uniform(self, low: float, high: float) -> float:
        self.drawn.append((low, high))
        return high


@pytest.fixture
def bench() -> QueueBench:
    return QueueBench()


def test_requests_keep_their_order_though_the_first_must_be_tried_again(bench: QueueBench) -> None:
    bench.requests.add(bench.request("first", AWAY, AWAY))
    bench.requests.add(bench.request("second", AWAY))
    bench.requests.add(bench.request("third"))

    bench.run()

    assert bench.done == ["first", "second", "third"]
    assert bench.tried == ["first", "first", "first", "second", "second", "third"]


def test_that_the_store_is_away_is_reported_at_each_try_and_that_it_is_back_once(bench: QueueBench) -> None:
    bench.requests.add(bench.request("first", AWAY, Unavailable("timed out")))
    bench.requests.add(bench.request("second"))

    bench.run()

    assert bench.events == [StoreFailed("no route"), StoreFailed("timed out"), StoreBack()]


def test_pauses_grow_to_their_longest_and_begin_again_after_a_response(bench: QueueBench) -> None:
    bench.requests.add(bench.request("first", *[AWAY] * 8))
    bench.requests.add(bench.request("second", AWAY))

    pauses_s = bench.run()

    assert pauses_s[0] == FIRST_BACKOFF_S
    assert pauses_s[:8] == sorted(pauses_s[:8])
    assert pauses_s[7:] == [BACKOFF_MAX_S, 0.0, FIRST_BACKOFF_S, 0.0]
    assert all(low == high / 2 for low, high in bench.drawn), "many agents lose the same store at the same moment"


def test_away_too_slow_refused_and_what_this_agent_lacks_are_distinguished(bench: QueueBench) -> None:
    errors = AWAY, TimedOut("no answer"), Rejected("etcd is full"), Denied("no permission"), OwnLimit("no more files")
    bench.requests.add(bench.request("first", *errors))

    bench.run()

    assert bench.events == [
        StoreFailed("no route"),
        StoreFailed("no answer", Trouble.SLOW),
        StoreFailed("etcd is full", Trouble.REFUSES),
        StoreFailed("no permission", Trouble.DENIED),
        StoreFailed("no more files", Trouble.OWN),
        StoreBack(),
    ]


@pytest.mark.parametrize("is_heads", [True, False])
def test_a_head_whose_host_sends_nothing_is_away_and_silent(bench: QueueBench, is_heads: bool) -> None:
    cause, error = TimedOut("no answer"), HeadAway("the job's store is silent: no answer")
    cause.is_silent, error.is_silent = True, is_heads
    error.__cause__ = cause
    bench.requests.add(bench.request("first", error))

    bench.run()

    # Not slow: its host would at least accept a connection.
    assert bench.events[0] == StoreFailed(str(error), is_heads=True, is_silent=is_heads)


def test_renewals_that_succeed_do_not_hide_a_request_that_never_does(bench: QueueBench) -> None:
    """Otherwise the log would be silent: each renewal would restart the time after which the trouble gets a line."""
    bench.requests.add(bench.request("first", *[Rejected("etcd is full")] * 3))
    bench.requests.do_next(0.0)
    for _ in range(2):
        bench.requests.add_renewal()
        bench.requests.do_next(0.0)
    refused = list(bench.events)

    bench.run()

    assert refused == [StoreFailed("etcd is full", Trouble.REFUSES)] * 3
    assert bench.events[3:] == [StoreBack()]
    assert bench.tried == ["first", *["renewal", "first"] * 2, "first"]


def test_a_renewal_that_is_refused_lets_what_waits_have_its_turn(bench: QueueBench) -> None:
    bench.failing["renewal"] = [Rejected("HTTP status 502")] * 2
    bench.requests.add_renewal()
    for name in ("first", "second"):
        bench.requests.add(bench.request(name))

    bench.run()

    assert bench.tried == ["renewal", "first", "renewal", "second", "renewal"]
    assert bench.events == [*[StoreFailed("HTTP status 502", Trouble.REFUSES)] * 2, StoreBack()]


def test_whoever_wants_to_go_waits_for_what_is_left_unless_the_store_is_away(bench: QueueBench) -> None:
    over = [bench.requests.is_over]
    bench.requests.add(bench.request("first", *[AWAY] * LAST_TRIES))
    over.append(bench.requests.is_over)
    for _ in range(LAST_TRIES):
        bench.requests.do_next(0.0)
        over.append(bench.requests.is_over)

    assert over == [True, False, *[False] * (LAST_TRIES - 1), True]
    assert bench.requests.is_away


def test_pending_writes_are_flushed_where_only_renewals_are_refused(bench: QueueBench) -> None:
    bench.failing["renewal"] = [Rejected("HTTP status 502")] * 10
    bench.requests.add_renewal()
    for _ in range(2 * LAST_TRIES):
        bench.requests.do_next(BACKOFF_MAX_S)

    bench.requests.add(bench.request("goodbye"))
    bench.requests.end()
    over = bench.requests.is_over
    bench.requests.do_next(BACKOFF_MAX_S)

    assert not over
    assert bench.done == ["goodbye"]
    assert bench.requests.is_over


@pytest.mark.parametrize(
    ("error", "was_reached", "longest_s"),
    [
        (TimedOut("slow"), False, SLOW_BACKOFF_MAX_S),
        (Unavailable("refused"), False, BACKOFF_MAX_S),
        (TimedOut("slow"), True, BACKOFF_MAX_S),
    ],
)
def test_only_who_has_nothing_to_lose_leaves_a_slow_store_alone_for_long(
    error: Unavailable, was_reached: bool, longest_s: float
) -> None:
    requests = RetryQueue(lambda: None, lambda _: None, BACKOFF_MAX_S, lambda _, high: high)
    if was_reached:
        requests.add_renewal()
        requests.do_next(0.0)

    def fail() -> None:
        raise error

    requests.add(fail)
    pauses_s = [0.0]
    for _ in range(20):
        pauses_s.append(requests.do_next(pauses_s[-1]))

    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] == longest_s
