"""rendezvous.server.unauthenticated, connection_limits: which connection is closed first, and how many may be open."""

from __future__ import annotations

import random

import pytest

from elaunch.rendezvous.server.connection_limits import (
    CONNECTIONS_MAX,
    OWN_DESCRIPTORS,
    slots,
    slots_for,
    unauthenticated_max,
)
from elaunch.rendezvous.server.unauthenticated import CROWD_S, FIRST_REQUEST_S, PER_ADDRESS, UnauthenticatedConnections


def unauthenticated(*counts: tuple[str, int]) -> UnauthenticatedConnections[str]:
    """So many connections of each address, each a second younger than the one before."""
    made: UnauthenticatedConnections[str] = UnauthenticatedConnections()
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
    assert them.crowds() == [(address, count) for address, count in them.crowds() if count == 2]


def test_one_of_a_quiet_address_outlives_any_number_of_a_loud_one() -> None:
    them = unauthenticated(("quiet", 1), ("loud", 10))

    for number in range(1000):
        one = them.first_to_go()
        assert one is not None
        assert one.startswith("loud")
        them.discard(one)
        them.add(f"loud-again-{number}", "loud", 20.0 + number)

    assert "quiet-0" in them


def test_all_have_their_time_and_those_beyond_what_an_address_may_have_less() -> None:
    crowd: UnauthenticatedConnections[int] = UnauthenticatedConnections()
    for number in range(PER_ADDRESS + 3):
        crowd.add(number, "here", 100.0)
    crowd.add(-1, "there", 100.0)

    assert crowd.overdue(100.0 + CROWD_S - 0.1) == []
    assert crowd.overdue(100.0 + CROWD_S) == [0, 1, 2]
    assert len(crowd.overdue(100.0 + FIRST_REQUEST_S)) == PER_ADDRESS + 4


@pytest.mark.parametrize("seed", range(20))
def test_they_are_counted_right_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    them: UnauthenticatedConnections[int] = UnauthenticatedConnections()
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
    assert found == slots_for(agents)
    # All agents may be unauthenticated at the same time, and stay so while all other connections are authenticated.
    assert unauthenticated_max(found, 0) == agents
    assert unauthenticated_max(found, 3 * agents) == agents
    assert unauthenticated_max(found, found) == 0


def test_memory_is_bounded_where_open_files_are_not() -> None:
    assert slots(1 << 30) == CONNECTIONS_MAX
    assert slots(1 << 30, CONNECTIONS_MAX) == 4 * CONNECTIONS_MAX
    assert slots(0) == 1
