"""agent.core.timeline: a job of many nodes tells each thing once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.events import Signalled, StoreLost, WorkersHung
from elaunch.agent.core.timeline import AnnouncementKind
from elaunch.rendezvous.store import Delete
from elaunch.rendezvous.types import FailureKind
from tests.unit.agent.driver import INT, KEYS, TERM, TWO, Driver, ends, failure, pair, settle, started

ELASTIC = replace(TWO, nodes_min=1)


def kinds(*drivers: Driver) -> list[str]:
    return [told.kind.value for driver in drivers for told in driver.announcements]


def test_a_failure_on_any_node_is_told_once_by_the_leader_with_the_restart_and_its_cause() -> None:
    first, second = pair()

    second.exits(1, -9, FailureKind.SIGNAL)
    settle(first, second)
    ends(second, -15)
    ends(first, -15)
    settle(first, second)

    assert kinds(first) == ["failure", "restart"]
    assert kinds(second) == []
    told, restart = first.announcements
    assert (told.generation, told.fields["failure"]["rank"], told.fields["failure"]["host"]) == (0, 1, "node-a")
    assert told.text.startswith("job job: rank 1 ")
    assert restart.text.startswith("job job goes on in generation 1: 6 workers on 2 nodes (restart 1 of 3")
    assert (restart.fields["restarts"], restart.fields["failure"]["code"]) == (1, -9)


def test_a_hang_is_called_so() -> None:
    driver = started()

    driver.happen(WorkersHung(0, failure(0, 2, None, FailureKind.HANG)))
    driver.settle()

    assert kinds(driver) == ["hang"]


@pytest.mark.parametrize(("code", "outcome"), [(0, "succeeded"), (1, "failed")])
def test_the_end_of_a_job_is_told_once(code: int, outcome: str) -> None:
    first, second = pair(replace(TWO, max_restarts=0))

    ends(second, code)
    settle(first, second)
    ends(first, -15 if code else 0)
    settle(first, second)

    assert kinds(second) == []
    assert kinds(first) == (["end"] if code == 0 else ["failure", "end"])
    assert first.announcements[-1].fields["outcome"] == outcome
    if code:
        assert "FAILED: rank 0 (local rank 0 on node-a, pid 100) exited with code 1" in first.announcements[-1].text


def test_a_leader_that_leaves_says_so_and_the_next_one_tells_the_rest() -> None:
    first, second = pair(ELASTIC)

    first.happen(Signalled(TERM, "SIGTERM"))
    settle(second)
    ends(first, -TERM)
    ends(second, -TERM)
    settle(first, second)
    ends(second)
    settle(second)

    assert kinds(first) == ["leave"]
    assert first.announcements[0].text == "job job: node-a leaves, since SIGTERM was received by node-a"
    assert kinds(second) == ["restart", "end"]


def test_where_the_store_is_gone_with_the_leader_one_other_node_tells() -> None:
    first, second = pair(replace(TWO, nodes_max=3))
    third = Driver(replace(TWO, nodes_max=3), host="node-c", store=first.store, remote=True).begin()
    settle(first, third)

    second.happen(StoreLost("the store is another one"))
    ends(second, -TERM)
    third.happen(StoreLost("the store is another one"))

    assert (kinds(second), kinds(third)) == (["end"], [])


def test_a_lost_node_is_a_failure_that_names_it() -> None:
    first, second = pair()

    second.lose_lease()
    first.write(Delete(KEYS.member(second.node_id)))
    first.settle()

    (told,) = first.announcements
    assert told.kind is AnnouncementKind.FAILURE
    assert told.text.startswith("job job: node-b was lost")


def test_ctrl_c_on_any_node_ends_the_job_and_is_told_by_the_leader() -> None:
    first, second = pair()

    second.happen(Signalled(INT, "SIGINT"))
    ends(second, -INT)
    settle(first, second)
    ends(first, -INT)
    settle(first, second)

    assert (kinds(first), kinds(second)) == (["end"], [])
    assert first.announcements[0].text == "job job was stopped, since SIGINT was received by node-b"
