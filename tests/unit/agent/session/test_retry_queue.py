"""agent.session.session: requests to the store keep their order, and each is tried until it is answered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elaunch.agent.core.events import StoreBack, StoreEvent, StoreFailed, Trouble
from elaunch.agent.session.session import FIRST_BACKOFF_S, LAST_TRIES, SLOW_BACKOFF_MAX_S, RetryQueue
from elaunch.rendezvous.store import Denied, HeadAway, OwnLimit, Rejected, StoreError, TimedOut, Unavailable

BACKOFF_MAX_S = 0.5
AWAY = Unavailable("no route")


class Bench:
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


def test_requests_keep_their_order_though_the_first_must_be_tried_again() -> None:
    bench = Bench()
    bench.requests.add(bench.request("first", AWAY, AWAY))
    bench.requests.add(bench.request("second", AWAY))
    bench.requests.add(bench.request("third"))

    bench.run()

    assert bench.done == ["first", "second", "third"]
    assert bench.tried == ["first", "first", "first", "second", "second", "third"]


def test_that_the_store_is_away_is_reported_at_each_try_and_that_it_is_back_once() -> None:
    bench = Bench()
    bench.requests.add(bench.request("first", AWAY, Unavailable("timed out")))
    bench.requests.add(bench.request("second"))

    bench.run()

    assert bench.events == [StoreFailed("no route"), StoreFailed("timed out"), StoreBack()]


def test_pauses_grow_to_their_longest_and_begin_again_after_a_response() -> None:
    bench = Bench()
    bench.requests.add(bench.request("first", *[AWAY] * 8))
    bench.requests.add(bench.request("second", AWAY))

    pauses_s = bench.run()

    assert pauses_s[0] == FIRST_BACKOFF_S
    assert pauses_s[:8] == sorted(pauses_s[:8])
    assert pauses_s[7:] == [BACKOFF_MAX_S, 0.0, FIRST_BACKOFF_S, 0.0]
    assert all(low == high / 2 for low, high in bench.drawn), "many agents lose the same store at the same moment"


def test_away_too_slow_and_refused_are_distinguished() -> None:
    bench = Bench()
    errors = AWAY, TimedOut("no answer"), Rejected("etcd is full"), Denied("no permission")
    bench.requests.add(bench.request("first", *errors))

    bench.run()

    assert bench.events == [
        StoreFailed("no route"),
        StoreFailed("no answer", Trouble.SLOW),
        StoreFailed("etcd is full", Trouble.REFUSES),
        StoreFailed("no permission", Trouble.DENIED),
        StoreBack(),
    ]


@pytest.mark.parametrize("is_heads", [True, False])
def test_a_head_whose_host_sends_nothing_is_away_and_silent(is_heads: bool) -> None:
    bench = Bench()
    cause, error = TimedOut("no answer"), HeadAway("the job's store is silent: no answer")
    cause.is_silent, error.is_silent = True, is_heads
    error.__cause__ = cause
    bench.requests.add(bench.request("first", error))

    bench.run()

    # Not slow: its host would at least accept a connection.
    assert bench.events[0] == StoreFailed(str(error), is_heads=True, is_silent=is_heads)


def test_what_this_agent_lacks_is_not_the_heads_silence() -> None:
    bench = Bench()
    bench.requests.add(bench.request("first", OwnLimit("no more files")))

    bench.run()

    assert bench.events == [StoreFailed("no more files", Trouble.OWN), StoreBack()]


def test_renewals_that_succeed_do_not_hide_a_request_that_never_does() -> None:
    """Otherwise the log would be silent: each renewal would restart the time after which the trouble gets a line."""
    bench = Bench()
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


def test_a_renewal_that_is_refused_lets_what_waits_have_its_turn() -> None:
    bench = Bench()
    bench.failing["renewal"] = [Rejected("HTTP status 502")] * 2
    bench.requests.add_renewal()
    for name in ("first", "second"):
        bench.requests.add(bench.request(name))

    bench.run()

    assert bench.tried == ["renewal", "first", "renewal", "second", "renewal"]
    assert bench.events == [*[StoreFailed("HTTP status 502", Trouble.REFUSES)] * 2, StoreBack()]


def test_whoever_wants_to_go_waits_for_what_is_left_unless_the_store_is_away() -> None:
    bench = Bench()
    over = [bench.requests.is_over]
    bench.requests.add(bench.request("first", *[AWAY] * LAST_TRIES))
    over.append(bench.requests.is_over)
    for _ in range(LAST_TRIES):
        bench.requests.do_next(0.0)
        over.append(bench.requests.is_over)

    assert over == [True, False, *[False] * (LAST_TRIES - 1), True]
    assert bench.requests.is_away


def test_pending_writes_are_flushed_where_only_renewals_are_refused() -> None:
    bench = Bench()
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
        (Unavailable("nobody listens"), False, BACKOFF_MAX_S),
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
