"""How many requests the store's client and its queue make, with a store that is slow, away, or reports late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from elaunch.agent.core.events import Looked, StoreEvent
from elaunch.agent.inbox import LookAgain
from elaunch.agent.session.job_store import JobStore, LocalHost
from elaunch.agent.session.retry_queue import SLOW_BACKOFF_MAX_S, RetryQueue
from elaunch.agent.session.store_client import StoreClient
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.engine.memory_store import MemoryStore
from elaunch.rendezvous.rules.snapshot import Keys
from elaunch.rendezvous.store import Answer, Put, TimedOut, Txn, Unavailable, Update, View, Watch
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Generation, OpenKind

KEYS = Keys("job")
LEADER = "host-00000001"
TIMES = Times()


class FarStore(MemoryStore):
    """A store in memory that counts requests. Its watches report changes only when `deliver` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.away: set[str] = set()
        self._on_the_way: list[Callable[[], None]] = []

    def _ask(self, what: str) -> None:
        self.asked[what] += 1
        if what in self.away:
            raise Unavailable("away")

    def check(self) -> str:
        self._ask("check")
        return super().check()

    def grant(self, lease: int, ttl_s: float) -> None:
        self._ask("grant")
        super().grant(lease, ttl_s)

    def read(self, *prefixes: str) -> View:
        self._ask("read")
        return super().read(*prefixes)

    def commit(self, txn: Txn) -> Answer:
        self._ask("commit")
        return super().commit(txn)

    def watch(self, prefix: str, after: int | None, tell: Callable[[Update], None]) -> Watch:  # type: ignore[override]
        self._ask("watch")
        if after is None:
            # The view comes at once. Later changes come with `deliver`.
            view = super().read(prefix)
            tell(view)
            after = view.revision
        return super().watch(prefix, after, lambda update: self._on_the_way.append(lambda: tell(update)))

    def deliver(self) -> None:
        on_the_way, self._on_the_way = self._on_the_way, []
        for tell in on_the_way:
            tell()

    def lose(self) -> None:
        """Drop all updates that are on their way."""
        self._on_the_way.clear()


class Agent:
    """A client with a far store, and the client's events."""

    def __init__(self, store: FarStore) -> None:
        self.now_s = 100.0
        self.posted: list[StoreEvent] = []
        self.client = StoreClient(
            JobStore(store, KEYS, is_remote=True),
            LocalHost("host", draw=lambda _: 4711, is_dead=lambda _: False, now=lambda: self.now_s),
            TIMES,
            self._post,
        )
        self.requests = RetryQueue(self.client.renew, self.posted.append, TIMES.backoff_max_s, lambda low, _: low)

    def _post(self, event: StoreEvent | LookAgain) -> None:
        if not isinstance(event, LookAgain):
            self.posted.append(event)

    def generation(self) -> int:
        """The newest generation that this agent knows."""
        looked = self.client.look()
        assert isinstance(looked, Looked)
        assert looked.snapshot.generation
        return looked.snapshot.generation.number

    def live(self, seconds: float) -> None:
        """Let time pass. The client does what falls due."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.1
            self.client.tick(self.now_s, self.requests)
            while self.requests.has_any and not self.requests.do_next(0.0):
                pass


def open_generation(store: MemoryStore, number: int) -> None:
    MemoryStore.commit(store, Txn((), (Put(KEYS.generation, encode(Generation(number, OpenKind.FAIL, "x"))),)))


@pytest.fixture
def store() -> FarStore:
    store = FarStore()
    open_generation(store, 0)
    MemoryStore.commit(store, Txn((), (Put(KEYS.leader, LEADER),)))
    return store


@pytest.fixture
def agent(store: FarStore) -> Agent:
    agent = Agent(store)
    agent.client.begin()
    store.asked.clear()
    return agent


def test_while_nothing_changes_nothing_is_read(store: FarStore, agent: Agent) -> None:
    agent.live(4 * TIMES.lease_ttl_s)

    assert store.asked.keys() == {"commit"}
    assert 3 <= store.asked["commit"] <= 4
    assert agent.generation() == 0


def test_a_watch_that_was_only_late_is_kept(store: FarStore, agent: Agent) -> None:
    open_generation(store, 1)
    agent.live(TIMES.lease_ttl_s + TIMES.keepalive_s)
    store.deliver()
    agent.live(4 * TIMES.lease_ttl_s)

    assert store.asked["watch"] == 0
    assert agent.generation() == 1


def test_a_deaf_watch_is_replaced(store: FarStore, agent: Agent) -> None:
    open_generation(store, 1)
    store.lose()
    agent.live(2 * (TIMES.lease_ttl_s + TIMES.keepalive_s))

    assert store.asked["watch"] == 1
    open_generation(store, 2)
    store.deliver()
    assert agent.generation() == 2


@pytest.mark.parametrize(
    ("error", "was_reached", "longest_s"),
    [
        (TimedOut("slow"), False, SLOW_BACKOFF_MAX_S),
        (Unavailable("nobody listens"), False, TIMES.backoff_max_s),
        (TimedOut("slow"), True, TIMES.backoff_max_s),
    ],
)
def test_only_who_has_nothing_to_lose_leaves_a_slow_store_alone_for_long(
    error: Unavailable, was_reached: bool, longest_s: float
) -> None:
    requests = RetryQueue(lambda: None, lambda _: None, TIMES.backoff_max_s, lambda _, high: high)
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
