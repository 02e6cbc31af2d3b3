"""agent.core.pace_watch: a node tells how long its ranks wait, and hears which node all others wait for."""

from __future__ import annotations

from elaunch.agent.core.actions import NameSlow
from elaunch.agent.core.events import Paced, Tick
from elaunch.rendezvous.rules.pace import CONFIRM_S, NodePace
from tests.unit.agent.driver import Driver, pair, settle, started

WAITS, WORKS = {0: 0.6, 1: 0.5, 2: 0.7}, {0: 0.5, 1: 0.1, 2: 0.55}


def told(driver: Driver) -> dict[str, NodePace]:
    return dict(driver.snapshot.pace.get(0, {}))


def test_a_node_tells_its_shares_by_rank_and_again_only_when_they_change() -> None:
    first, second = pair()
    seat = second.agent.snapshot.tables[0].seats[1]

    second.happen(Paced(0, WORKS))
    assert told(first) == {second.node_id: NodePace(second.node_id, seat.first_rank + 1, 0.1, 0.55)}
    second.happen(Paced(0, WORKS))
    assert second.commits == []
    second.happen(Paced(0, WAITS))
    assert told(first)[second.node_id].least == 0.5


def test_a_node_that_is_alone_tells_nobody() -> None:
    driver = started()

    driver.happen(Paced(0, WORKS))

    assert driver.acted == []


def test_the_node_of_rank_0_says_who_is_slow_and_the_slow_node_looks_for_the_cause_once() -> None:
    first, second = pair()
    first.happen(Paced(0, WAITS))
    second.happen(Paced(0, WORKS))
    settle(first, second)
    assert first.agent.lead_at_s == first.now_s + CONFIRM_S
    first.now_s = second.now_s = first.agent.lead_at_s
    first.happen(Tick())
    settle(first, second)

    (named,) = [action for action in second.all_acted if isinstance(action, NameSlow)]
    assert (named.slow.node_id, named.slow.rank, named.slow.others) == (second.node_id, 4, 0.5)
    assert not any(isinstance(action, NameSlow) for action in first.all_acted)
    said = [text for driver in (first, second) for text in said_by(driver) if "slower" in text]
    assert said == [
        "rank 4 on node-b is slower than the ranks of the other nodes: those wait in collectives for 50% of the time or"
        " more, and it for 10%; the log of that node says what differs there"
    ]
    second.look()
    assert second.acted == []


def said_by(driver: Driver) -> list[str]:
    return [action.text for action in driver.all_acted if hasattr(action, "text")]
