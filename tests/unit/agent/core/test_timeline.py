"""agent.core.timeline: what an agent learns and decides is on its timeline, in the documented form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.events import GroupFailed, Signalled, StoreBack, StoreFailed, StoreLost
from elaunch.agent.core.timeline import Entry
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.hang_verdict import Hang
from elaunch.rendezvous.store import Delete, Put
from elaunch.rendezvous.types import FailureKind
from tests.event_schema import check_event
from tests.unit.agent.driver import KEYS, TERM, TWO, Driver, ends, failure, pair, settle


def check(driver: Driver) -> None:
    for entry in driver.entries:
        check_event(
            {"at": 0.0, "monotonic_s": 0.0, "generation": entry.generation, "event": entry.event} | entry.fields
        )


def named(driver: Driver, *events: str) -> list[Entry]:
    return [entry for entry in driver.entries if entry.event in events]


def test_a_failure_is_recorded_at_once_again_with_its_output_and_as_the_reason_of_the_restart(driver: Driver) -> None:
    driver.exits(1, -9, FailureKind.SIGNAL)
    driver.settle()
    ends(driver, -15)
    driver.settle()

    check(driver)
    story = [(entry.generation, entry.event) for entry in driver.entries if entry.generation >= 0]
    assert story == [
        (0, "opened"),
        (0, "joined"),
        (0, "failed"),
        (1, "opened"),
        (0, "cause"),
        (1, "joined"),
        (1, "restarting"),
    ]
    (restarting,) = named(driver, "restarting")
    assert restarting.fields["reason"] == "restart 1 of 3"
    assert (restarting.fields["restarts"], restarting.fields["max_restarts"]) == (1, 3)
    assert restarting.fields["failure"]["rank"] == 1
    for entry in named(driver, "failed", "cause"):
        assert (entry.fields["rank"], entry.fields["code"], entry.fields["kind"]) == (1, -9, "signal")
    assert "traceback" not in named(driver, "failed")[0].fields


def test_the_jobs_first_failure_is_recorded_before_the_one_that_ended_the_job_where_the_kinds_differ() -> None:
    first, second = pair(replace(TWO, max_restarts=1))
    for driver, code in ((second, 7), (first, 9)):
        driver.exits(1, code)
        settle(first, second)
        ends(second, -TERM)
        ends(first, -TERM)
        settle(first, second)

    check(first)
    for driver in (first, second):
        (gave_up,) = named(driver, "gave_up")
        assert list(gave_up.fields)[-2:] == ["first_failure", "failure"]
        assert (gave_up.fields["first_failure"]["generation"], gave_up.fields["first_failure"]["code"]) == (0, 7)
        assert gave_up.fields["failure"]["code"] == 9
    end = first.announcements[-1]
    assert end.fields["text"].startswith("job job FAILED: failed first in generation 0: rank 1 (")
    assert "exited with code 9" in end.fields["text"]
    assert list(end.fields)[-2:] == ["first_failure", "failure"]


def test_a_lost_node_and_the_one_that_takes_its_place_are_named_on_each_node() -> None:
    first, second = pair()
    spare = Driver(TWO, host="node-c", store=first.store, remote=True).begin()
    settle(first, spare)
    assert [(entry.generation, entry.event) for entry in spare.entries][-1] == (0, "spare")

    second.lose_lease()
    first.write(Delete(KEYS.member(second.node_id)))
    first.settle()
    ends(first, -15)
    settle(first, spare)

    for driver in (first, spare):
        check(driver)
        (lost,), (joined,) = named(driver, "node_lost"), named(driver, "node_joined")
        assert (lost.fields["hosts"], joined.fields["hosts"]) == (["node-b"], ["node-c"])
        (restarting,) = named(driver, "restarting")
        assert restarting.fields["kind"] == "loss"
        assert restarting.fields["reason"].startswith("node-b was lost")
    assert len(named(spare, "spare")) == 1


def test_a_store_that_fails_is_recorded_when_it_is_logged_and_once(driver: Driver) -> None:
    driver.happen(StoreFailed("no route to host"))
    assert not named(driver, "store_away")
    driver.after(3)
    driver.after(100)
    driver.happen(StoreBack())
    driver.happen(StoreBack())

    check(driver)
    away, back = named(driver, "store_away", "store_back")
    assert (away.event, away.fields["why"], back.event) == ("store_away", "no route to host", "store_back")


def test_a_job_that_seems_to_hang_and_resumes_is_recorded_once_each(driver: Driver) -> None:
    driver.agent = replace(driver.agent, restarts_hung=False)

    driver.write(Put(KEYS.hang, encode(Hang(0, driver.node_id, 1, "hung: it sleeps, and the others wait,"))))
    # The leader takes the verdict back: no node stands still.
    driver.settle()

    check(driver)
    hung, on = named(driver, "seems_hung", "goes_on")
    assert hung.fields == {"host": "node-a", "message": "it sleeps, and the others wait", "rank": 1}
    assert (on.event, on.generation) == ("goes_on", 0)
    (notified,) = driver.announcements
    assert notified.fields["text"] == "job job seems to hang: rank 1 on node-a sleeps, and the others wait"


def test_a_node_that_leaves_is_not_lost() -> None:
    first, second = pair(replace(TWO, nodes_min=1))

    second.happen(Signalled(TERM, "SIGTERM"))
    ends(second, -15)
    settle(first)
    ends(first, -15)
    settle(first)

    check(first)
    check(second)
    assert named(second, "signalled")[0].fields == {"signal": "SIGTERM"}
    assert second.entries[-1].fields["outcome"] == "interrupted"
    assert [entry.event for entry in named(first, "node_left", "node_lost")] == ["node_left"]


def test_a_verdict_of_a_hang_that_is_written_again_is_not_recorded_again() -> None:
    _, second = pair()

    for message in ("hung: it sleeps,", "hung: it still sleeps,"):
        second.write(Put(KEYS.hang, encode(Hang(0, second.node_id, -1, message))))
        second.settle()

    assert [entry.fields["message"] for entry in named(second, "seems_hung", "goes_on")] == ["it sleeps"]
    assert second.announcements == []


def kinds(*drivers: Driver) -> list[str]:
    return [notified.event for driver in drivers for notified in driver.announcements]


def test_a_failure_on_any_node_is_announced_once_by_the_leader_with_the_restart_and_its_cause() -> None:
    first, second = pair()

    second.exits(1, -9, FailureKind.SIGNAL)
    settle(first, second)
    ends(second, -15)
    ends(first, -15)
    settle(first, second)

    assert kinds(first) == ["failure", "restart"]
    assert kinds(second) == []
    notified, restart = first.announcements
    assert (notified.generation, notified.fields["failure"]["rank"], notified.fields["failure"]["host"]) == (
        0,
        1,
        "node-a",
    )
    assert notified.fields["text"].startswith("job job: rank 1 ")
    assert restart.fields["text"].startswith("job job continues in generation 1: 6 workers on 2 nodes (restart 1 of 3")
    assert (restart.fields["restarts"], restart.fields["failure"]["code"]) == (1, -9)


def test_a_hang_is_called_so(driver: Driver) -> None:
    driver.happen(GroupFailed(0, failure(0, 2, None, FailureKind.HANG)))
    driver.settle()

    assert kinds(driver) == ["hang"]


@pytest.mark.parametrize(("code", "outcome"), [(0, "succeeded"), (1, "failed")])
def test_the_end_of_a_job_is_announced_once(code: int, outcome: str) -> None:
    first, second = pair(replace(TWO, max_restarts=0))

    ends(second, code)
    settle(first, second)
    ends(first, -15 if code else 0)
    settle(first, second)

    assert kinds(second) == []
    assert kinds(first) == (["end"] if code == 0 else ["failure", "end"])
    assert first.announcements[-1].fields["outcome"] == outcome
    if code:
        assert (
            "FAILED: rank 0 (local rank 0 on node-a, pid 100) exited with code 1"
            in first.announcements[-1].fields["text"]
        )


def test_after_a_leader_that_leaves_the_next_one_announces_the_rest() -> None:
    first, second = pair(replace(TWO, nodes_min=1))

    first.happen(Signalled(TERM, "SIGTERM"))
    settle(second)
    ends(first, -TERM)
    ends(second, -TERM)
    settle(first, second)
    ends(second)
    settle(second)

    assert kinds(first) == []
    assert "node-a leaves (SIGTERM was received by node-a)" in second.announcements[0].fields["text"]
    assert kinds(second) == ["restart", "end"]


def test_where_the_store_is_gone_with_the_leader_one_other_node_announces_the_end() -> None:
    first, second = pair(replace(TWO, nodes_max=3))
    third = Driver(replace(TWO, nodes_max=3), host="node-c", store=first.store, remote=True).begin()
    settle(first, third)

    second.happen(StoreLost("the store is another one"))
    ends(second, -TERM)
    third.happen(StoreLost("the store is another one"))

    assert (kinds(second), kinds(third)) == (["end"], [])
