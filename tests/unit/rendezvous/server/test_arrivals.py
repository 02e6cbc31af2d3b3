"""rendezvous.server.arrivals: which handshake is next, and when a lag is logged."""

from __future__ import annotations

import random

import pytest

from elaunch.rendezvous.server.arrivals import LAG_S, LATE_S, Arrivals


def arrived(*each: tuple[str, int], since_s: float = 0.0) -> Arrivals[str]:
    """This number of connections from each address, in this order and at one time. Names are address and number."""
    made: Arrivals[str] = Arrivals()
    for address, count in each:
        for number in range(count):
            made.add(f"{address}-{number}", address, since_s)
    return made


def in_turn(them: Arrivals[str], now_s: float) -> list[str]:
    return [them.next(now_s) for _ in range(len(them))]


def test_the_addresses_take_turns_however_many_connections_one_has_opened_before() -> None:
    them = arrived(("loud", 1000), ("quiet", 1), ("other", 2))

    assert in_turn(them, 0.0)[:6] == ["loud-0", "quiet-0", "other-0", "loud-1", "other-1", "loud-2"]


def test_who_comes_while_one_address_never_ends_waits_for_one_connection_of_each_address() -> None:
    them = arrived(("loud", 1000), ("louder", 2000))
    for number in range(100):
        them.next(0.0)
        them.add(f"more-{number}", "loud", 0.0)

    them.add("agent", "quiet", 0.0)

    assert "agent" in [them.next(0.0) for _ in range(3)]


def test_agents_that_start_together_at_one_address_come_in_their_order() -> None:
    them = arrived(("here", 1024))

    assert in_turn(them, LATE_S / 2) == [f"here-{number}" for number in range(1024)]


def test_the_newest_is_next_where_the_oldest_has_waited_too_long() -> None:
    them = arrived(("loud", 3))
    them.add("agent", "loud", LATE_S)

    assert in_turn(them, LATE_S) == ["agent", "loud-2", "loud-1", "loud-0"]


def test_the_lag_of_one_address_makes_no_other_lose_its_order() -> None:
    them = arrived(("loud", 3))
    them.add("first", "quiet", LATE_S)
    them.add("second", "quiet", LATE_S)

    turns = in_turn(them, LATE_S)

    assert turns.index("first") < turns.index("second")


def test_a_lag_is_said_with_the_address_that_opens_the_most_and_the_way_out() -> None:
    them = arrived(("loud", 3000), ("quiet", 20))

    assert them.tell_lag(LAG_S, interval_s=2.0) == (
        "TLS handshakes are up to 2.0 s late, so agents may not get in: 3020 connections wait for theirs; loud opens"
        " the most, 1500 a second without the job's token; if it is none of the job's hosts, keep it out with a"
        " firewall, or give the job another --rdzv-endpoint"
    )


def test_nothing_is_said_while_handshakes_come_in_time() -> None:
    them = arrived(("loud", 3000))

    assert them.tell_lag(LAG_S - 0.1, interval_s=1.0) is None
    in_turn(them, LAG_S)
    assert them.tell_lag(LAG_S, interval_s=1.0) is None


def test_agents_that_come_in_are_not_said_to_be_the_lag() -> None:
    them = arrived(("here", 1024))
    assert them.tell_lag(1.0, interval_s=1.0) is None
    for _ in range(500):
        them.next(LAG_S)
        them.shown("here")

    assert them.tell_lag(LAG_S, interval_s=1.0) is None


@pytest.mark.parametrize("seed", range(20))
def test_each_has_its_turn_once_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    them: Arrivals[int] = Arrivals()
    waiting: set[int] = set()

    for number in range(300):
        match rng.random():
            case chance if chance < 0.5:
                waiting.add(number)
                them.add(number, rng.choice("abcde"), float(number))
            case chance if chance < 0.7:
                gone = rng.choice([*waiting, -1])
                waiting.discard(gone)
                them.discard(gone)
            case _ if waiting:
                waiting.remove(them.next(float(number)))
        assert len(them) == len(waiting)
        assert all(one in them for one in waiting)
