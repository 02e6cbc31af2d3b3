"""rendezvous.server.admission: which connection is closed first, whose handshake is next, and how many may be open."""

from __future__ import annotations

import random

import pytest

from elaunch.rendezvous.server.admission import (
    CONNECTIONS_MAX,
    CROWD_S,
    FIRST_REQUEST_S,
    LAG_S,
    LATE_S,
    OWN_DESCRIPTORS,
    PER_ADDRESS,
    Unauthenticated,
    slots,
    slots_for,
    unauthenticated_max,
)


def unauthenticated(*counts: tuple[str, int]) -> Unauthenticated[str]:
    """So many connections of each address, each a second younger than the one before."""
    made: Unauthenticated[str] = Unauthenticated()
    for address, count in counts:
        for number in range(count):
            made.add(f"{address}-{number}", address, float(number))
    return made


def test_the_first_to_go_is_the_oldest_of_the_address_that_has_the_most() -> None:
    them = unauthenticated(("quiet", 2), ("loud", 5), ("other", 4))
    gone = []

    while (one := them.first_to_go()) and len(gone) < 5:
        gone.append(one)
        them.discard(one)

    # When `loud` has lost one connection, it has as many as `other`. From then on both lose one in turn.
    assert gone[0] == "loud-0"
    assert sorted(gone) == ["loud-0", "loud-1", "loud-2", "other-0", "other-1"]
    assert {*them.crowds()} == {("quiet", 2), ("loud", 2), ("other", 2)}


def test_all_have_their_time_and_those_beyond_what_an_address_may_have_less() -> None:
    crowd: Unauthenticated[int] = Unauthenticated()
    for number in range(PER_ADDRESS + 3):
        crowd.add(number, "here", 100.0)
    crowd.add(-1, "there", 100.0)

    assert crowd.overdue(100.0 + CROWD_S - 0.1) == []
    assert crowd.overdue(100.0 + CROWD_S) == [0, 1, 2]
    assert len(crowd.overdue(100.0 + FIRST_REQUEST_S)) == PER_ADDRESS + 4


@pytest.mark.parametrize("seed", range(5))
def test_they_are_counted_right_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    them: Unauthenticated[int] = Unauthenticated()
    model: dict[int, str] = {}

    for number in range(300):
        if rng.random() < 0.6:
            model[number] = rng.choice("abcde")
            them.add(number, model[number], float(number))
        else:
            gone = rng.choice([*model, -1])
            model.pop(gone, None)
            them.discard(gone)
        counts = {address: list(model.values()).count(address) for address in model.values()}
        assert len(them) == len(model)
        assert dict(them.crowds(10)) == counts
        first = them.first_to_go()
        if model:
            assert first is not None
            assert counts[model[first]] == max(counts.values())
            assert first == min(one for one in model if model[one] == model[first])
        else:
            assert first is None


@pytest.mark.parametrize("agents", [1, 2, 13, 1024, 4096, 20_000])
def test_a_limit_of_open_files_that_is_enough_for_so_many_agents_is(agents: int) -> None:
    found = slots(slots_for(agents) + OWN_DESCRIPTORS, agents)

    assert found == slots_for(agents)
    # All agents may be unauthenticated at the same time, and stay so while all other connections are authenticated.
    assert unauthenticated_max(found, 0) == agents
    assert unauthenticated_max(found, 3 * agents) == agents
    assert unauthenticated_max(found, found) == 0


def test_memory_is_bounded_where_open_files_are_not() -> None:
    assert slots(1 << 30) == CONNECTIONS_MAX
    assert slots(1 << 30, CONNECTIONS_MAX) == 4 * CONNECTIONS_MAX
    assert slots(0) == 1


# Whose turn it is.


def arrive(them: Unauthenticated[str], who: str, address: str, now_s: float) -> None:
    them.add(who, address, now_s)
    them.arrive(who, now_s)


def arrived(*each: tuple[str, int], since_s: float = 0.0) -> Unauthenticated[str]:
    """This number of connections from each address, in this order and at one time. Names are address and number."""
    made: Unauthenticated[str] = Unauthenticated()
    for address, count in each:
        for number in range(count):
            arrive(made, f"{address}-{number}", address, since_s)
    return made


def in_turn(them: Unauthenticated[str], now_s: float) -> list[str]:
    return [them.next_arrival(now_s) for _ in range(len(them))]


def test_the_addresses_take_turns_however_many_connections_one_has_opened_before() -> None:
    them = arrived(("loud", 1000), ("quiet", 1), ("other", 2))

    assert in_turn(them, 0.0)[:6] == ["loud-0", "quiet-0", "other-0", "loud-1", "other-1", "loud-2"]


def test_agents_that_start_together_at_one_address_come_in_their_order() -> None:
    them = arrived(("here", 1024))

    assert in_turn(them, LATE_S / 2) == [f"here-{number}" for number in range(1024)]


def test_the_newest_is_next_where_the_oldest_has_waited_too_long() -> None:
    them = arrived(("loud", 3))
    arrive(them, "agent", "loud", LATE_S)

    assert in_turn(them, LATE_S) == ["agent", "loud-2", "loud-1", "loud-0"]


def test_a_lag_is_reported_with_the_address_that_opens_the_most_and_the_way_out() -> None:
    them = arrived(("loud", 3000), ("quiet", 20))

    assert them.lag_report(LAG_S, interval_s=2.0) == (
        "TLS handshakes are up to 2.0 s late, so agents may not get in: 3020 connections wait for theirs; loud opens"
        " the most, 1500 a second without the job's token; if it is none of the job's hosts, keep it out with a"
        " firewall, or give the job another --rdzv-endpoint"
    )


def test_agents_that_are_admitted_are_not_counted_as_the_lag() -> None:
    them = arrived(("here", 1024))
    assert them.lag_report(1.0, interval_s=1.0) is None
    for _ in range(500):
        them.shown(them.next_arrival(LAG_S))

    assert them.lag_report(LAG_S, interval_s=1.0) is None
