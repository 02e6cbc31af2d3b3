"""agent.core.membership: the agent's part in the job's rendezvous, on a memory store that agents may share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Action, Join, Renew, SignalWorkers, Widen
from elaunch.agent.core.events import Committed, Event, Leased, LeaseLost, Signalled, Tag, Tick
from elaunch.agent.core.state import Finished, Joining, Running
from elaunch.agent.core.step import deadline_s, step
from elaunch.rendezvous.store import Delete
from elaunch.rendezvous.types import OpenKind, OutcomeKind, Program, ProgramKind
from tests.unit.agent.driver import (
    ALL,
    INT,
    KEYS,
    SPEC,
    START_S,
    TERM,
    TIMES,
    TWO,
    Driver,
    ends,
    pair,
    settle,
    started,
    tags,
)

# --- entering


def test_nothing_is_decided_from_a_snapshot_older_than_the_last_response() -> None:
    driver = Driver().begin()
    driver.answer()
    nothing_there = driver.snapshot_changed
    driver.happen(nothing_there)
    driver.answer()

    driver.happen(nothing_there)

    assert driver.commits == []
    assert driver.settle() != []


# --- terms


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nodes_max": 3}, "--nnodes 2:2 there, 2:3 here"),
        ({"max_restarts": 9}, "--max-restarts 3 there, 9 here"),
        ({"restart_window_s": 60.0}, "--restart-window None there, 60.0 here"),
        (
            {"program": Program(ProgramKind.MODULE, "train", ("--lr", "2"))},
            "the command `train.py` there, `-m train --lr 2` here",
        ),
        ({"nodes_min": 1, "max_restarts": 0}, "--nnodes 2:2 there, 1:2 here; --max-restarts 3 there, 0 here"),
    ],
    ids=["nnodes", "max restarts", "window", "command", "two of them"],
)
def test_a_node_that_does_not_fit_the_job_refuses_with_both_values_and_the_job_is_untouched(
    changes: dict[str, object], text: str
) -> None:
    first = Driver(TWO, host="node-a").begin()
    first.settle()
    other = replace(TWO, **changes)  # type: ignore[arg-type]
    second = Driver(other, host="node-b", store=first.store, remote=True).begin()
    before = first.store.read(KEYS.root)

    done = second.settle()

    assert done == []
    assert (second.outcome.kind, second.outcome.exit_code) == (OutcomeKind.REFUSED, 2)
    assert second.outcome.reason == (
        f"this node does not fit the running job job: {text}; type the same on all nodes, or choose another --run-id"
    )
    assert first.store.read(KEYS.root).entries == before.entries


# --- joining


def test_a_join_that_was_refused_since_the_generation_moved_is_tried_for_the_newer_one() -> None:
    first, second = pair()
    first.exits(0, 3)
    ends(first, -TERM)
    second.settle()
    ends(second, -TERM)
    assert tags(second) == [Tag.JOIN]
    second.open(2, OpenKind.LOSS, "node-c was lost")
    second.answers.clear()
    done = second.happen(Committed(Tag.JOIN, False, second.store.read(KEYS.root).revision)) + second.sync()

    assert done == [Join(second.lease, True, True)]
    assert isinstance(second.agent.phase, Joining)
    assert second.agent.phase.joined == 2


def test_an_evicted_node_returns_as_a_new_one_and_logs_it() -> None:
    first, second = pair()
    evicted = second.node_id
    first.exits(0, 3)
    ends(first, -TERM)
    first.settle()
    second.write(Delete(KEYS.member(evicted)), Delete(KEYS.joined(1, evicted)))
    second.settle()
    ends(second, -TERM)

    text: list[str] = []
    done: list[Action] = []
    while second.answers:
        done += second.answer()
        text.append(second.logged)
        done += second.sync()
        text.append(second.logged)

    assert [type(action) for action in done] == [Renew, Join]
    assert "the others waited too long for this node, and it lost its seat; it rejoins as a new node" in text
    assert second.node_id != evicted
    assert set(second.snapshot.members) == {first.node_id, second.node_id}
    settle(first, second)
    assert isinstance(second.agent.phase, Running)


def test_an_evicted_node_that_is_the_last_one_does_not_try_to_lead_for_ever() -> None:
    first, second = pair()
    evicted = second.node_id
    first.exits(0, 3)
    second.settle()
    second.write(Delete(KEYS.member(evicted)), Delete(KEYS.leader), Delete(KEYS.member(first.node_id)))

    tried = second.settle()
    ends(second, -TERM)
    second.settle()

    assert tried == [Renew()]
    assert second.node_id != evicted
    assert second.snapshot.leader == second.node_id
    assert set(second.snapshot.members) == {second.node_id}


@pytest.mark.parametrize("has_left", [False, True], ids=["that leads", "that has left since"])
def test_who_lost_an_election_to_another_stays_who_it_is_and_is_not_evicted(has_left: bool) -> None:
    first, second = pair()
    third = Driver(TWO, store=first.store, host="node-c", remote=True).begin()
    third.settle()
    first.lose_lease()
    late = second.snapshot_changed
    third.settle()
    second.happen(late)
    if has_left:
        second.write(Delete(KEYS.member(third.node_id)), Delete(KEYS.leader))

    second.settle()

    assert second.snapshot.leader == (second if has_left else third).node_id
    assert second.incarnations == 1
    assert not second.agent.membership.outvoted
    assert "lost its seat" not in second.logged


def test_a_join_with_a_lease_that_has_ended_is_made_again_with_another() -> None:
    first = Driver(TWO, host="node-a").begin()
    first.settle()
    second = Driver(TWO, host="node-b", store=first.store, remote=True).begin()
    second.answer()
    second.store.revoke(second.lease)

    second.sync()
    settle(first, second)

    assert isinstance(second.agent.phase, Running)
    assert second.incarnations == 2


# --- leading


def test_a_follower_that_becomes_leader_reads_all_keys_before_it_acts() -> None:
    first, second = pair()
    first.lose_lease()
    second.sync()
    assert tags(second) == [Tag.ELECT]
    second.answer()

    widened = second.sync()
    commits = second.commits
    acted = second.sync()

    assert widened == [Widen()]
    assert commits == []
    assert tags(second) == [Tag.LEAD]
    assert acted == []
    assert second.generation.kind is OpenKind.LOSS


# --- going


@pytest.mark.parametrize(
    "event", [Committed(Tag.JOIN, False, 99), LeaseLost(1)], ids=["an answer that is not awaited", "of an older lease"]
)
def test_what_is_no_news_changes_nothing(driver: Driver, event: Event) -> None:
    before = driver.agent

    assert driver.happen(event) == []
    assert driver.agent == before


def test_the_terms_of_an_old_run_bind_no_node() -> None:
    old = started()
    old.store.revoke(old.lease)

    new = Driver(replace(SPEC, max_restarts=9), store=old.store, host="node-b").begin()
    new.settle()

    assert isinstance(new.agent.phase, Running)
    assert new.snapshot.terms
    assert new.snapshot.terms.max_restarts == 9


def test_followers_never_write_what_is_the_leaders() -> None:
    first, second = pair()
    second.lose_lease()

    second.settle()
    assert second.generation.number == 0
    assert not second.agent.leads
    assert first.agent.leads


def test_a_node_on_its_way_out_writes_nothing_more_for_the_job() -> None:
    first, second = pair()
    first.happen(Signalled(TERM, "SIGTERM"))
    second.settle()
    ends(second, -TERM)
    second.settle()

    done = first.settle()

    assert done == []
    assert first.node_id not in first.snapshot.members
    assert not first.agent.leads
    assert first.agent.lead_at_s is None


# --- a lease that has ended


def test_a_running_node_whose_lease_ended_goes_on_as_the_same_member_if_nothing_was_opened() -> None:
    first, second = pair()
    me, workers = second.node_id, second.agent.phase

    renewed = second.lose_lease()
    gone = set(second.snapshot.members)
    done = second.settle()

    assert (renewed, done) == ([Renew()], [])
    assert gone == {first.node_id}
    assert set(second.snapshot.members) == {first.node_id, me}
    assert (second.node_id, second.agent.phase) == (me, workers)


def test_a_running_node_whose_lease_ended_stops_first_and_joins_as_a_new_one_if_a_generation_was_opened() -> None:
    first, second = pair()
    old = second.node_id
    second.lose_lease()
    first.settle()
    assert first.generation.kind is OpenKind.LOSS

    stopped = second.settle()
    while_it_stops = (second.node_id, set(second.snapshot.members))
    ends(second, -TERM)
    ends(first, -TERM)
    settle(first, second)

    assert stopped == [SignalWorkers(0, ALL, TERM)]
    assert while_it_stops == (old, {first.node_id})
    assert second.node_id != old
    assert isinstance(second.agent.phase, Running)
    assert second.agent.phase.table.generation == 1
    assert second.agent.phase.table.restarts == 0


def test_a_stopping_node_whose_lease_ended_comes_back_as_a_new_one_once_its_workers_are_gone() -> None:
    first, second = pair()
    old = second.node_id
    first.exits(0, 3)
    second.settle()
    second.lose_lease()
    second.settle()

    while_it_stops = second.node_id
    ends(second, -TERM)
    ends(first, -TERM)
    settle(first, second)

    assert while_it_stops == old
    assert second.node_id != old
    assert isinstance(second.agent.phase, Running)


def test_leases_that_end_at_once_are_not_begun_at_once() -> None:
    driver, leases = Driver(), 1
    happened: Event | None = Leased(leases, "a-1")
    while happened and driver.now_s < START_S + 60 and leases < 1000:
        driver.agent, actions = step(driver.agent, happened, driver.now_s)
        if isinstance(happened, Leased):
            happened = LeaseLost(leases)
        elif any(isinstance(action, Renew) for action in actions):
            leases += 1
            happened = Leased(leases, f"a-{leases}")
        else:
            due_s = deadline_s(driver.agent)
            driver.now_s, happened = due_s or 0.0, Tick() if due_s else None

    assert leases <= 60 / TIMES.keepalive_s + 2


def test_leases_that_end_again_and_again_do_not_hide_a_loss_for_ever() -> None:
    first, _ = pair()
    until_s = [first.agent.lossless_until_s]
    hidden_s, step_s = 0.0, 0.1
    for lease in range(1000, 1200):
        for event in (Leased(lease, f"a-{lease}"), LeaseLost(lease)):
            first.agent, _ = step(first.agent, event, first.now_s)
        until_s.append(first.agent.lossless_until_s)
        hidden_s += step_s * (first.now_s < until_s[-1])
        first.now_s += step_s

    assert 0.3 < hidden_s / (200 * step_s) < 0.7


def test_a_finished_node_whose_lease_ended_stays_the_same_member_if_nothing_was_opened() -> None:
    first, second = pair()
    ends(second)
    me = second.node_id
    assert isinstance(second.agent.phase, Finished)

    second.lose_lease()
    settle(first, second)

    assert set(second.snapshot.members) == {first.node_id, me}
    ends(first)
    settle(first, second)
    assert (first.outcome.exit_code, second.outcome.exit_code) == (0, 0)


@pytest.mark.parametrize("signum", [INT, TERM])
def test_a_node_on_its_way_out_begins_no_other_lease(driver: Driver, signum: int) -> None:
    driver.happen(Signalled(signum, "SIGX"))

    assert driver.lose_lease() == []
