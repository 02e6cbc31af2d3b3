"""agent.core.membership: the agent's part in the job's rendezvous, on a memory store that agents may share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Action, Exit, Join, Renew, Widen
from elaunch.agent.core.events import Committed, Signalled, Tag
from elaunch.agent.core.state import Exited, Running
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.job_spec import Program, ProgramKind
from elaunch.rendezvous.store import Delete, Put
from elaunch.rendezvous.types import OpenKind, Outcome, OutcomeKind
from tests.unit.agent.driver import (
    KEYS,
    SPEC,
    TERM,
    TWO,
    Driver,
    ends,
    pair,
    settle,
    started,
    tags,
)

ENDED = Outcome(OutcomeKind.FAILED, "the budget is spent", 0, 0, 3)


# --- entering


def test_nothing_is_decided_from_a_look_older_than_the_last_answer() -> None:
    driver = Driver().begin()
    driver.answer()
    nothing_there = driver.looked
    driver.happen(nothing_there)
    driver.answer()

    driver.happen(nothing_there)

    assert driver.commits == []
    assert driver.settle() != []


# --- terms


@pytest.mark.parametrize(
    ("changes", "words"),
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
    changes: dict[str, object], words: str
) -> None:
    first = Driver(TWO, host="node-a").begin()
    first.settle()
    other = replace(TWO, **changes)  # type: ignore[arg-type]
    second = Driver(other, host="node-b", store=first.store, remote=True).begin()
    before = first.store.read(KEYS.root)

    done = second.settle()

    assert [type(action) for action in done] == [Exit]
    assert (second.outcome.kind, second.outcome.exit_code) == (OutcomeKind.REFUSED, 2)
    assert second.outcome.reason == (
        f"this node does not fit the job job that runs: {words}; type the same on all nodes, or choose another --run-id"
    )
    assert first.store.read(KEYS.root).entries == before.entries


# --- a job id that was used before


def test_an_old_run_that_ended_is_followed_by_a_new_one() -> None:
    old = started()
    ends(old)
    old.settle()
    assert isinstance(old.agent.phase, Exited)
    old.store.revoke(old.lease)

    new = Driver(store=old.store, host="node-b").begin()
    new.settle()

    assert isinstance(new.agent.phase, Running)
    assert new.agent.phase.table.generation == 1


def test_who_comes_to_a_run_that_has_ended_while_members_are_still_there_ends_as_it_did() -> None:
    old = started()
    old.write(Put(KEYS.ended, encode(ENDED)))

    late = Driver(store=old.store, host="node-b", remote=True).begin()
    late.settle()

    assert late.outcome == ENDED
    assert late.snapshot.ended == ENDED


# --- joining


def test_an_evicted_node_comes_back_as_a_new_one_and_says_so() -> None:
    first, second = pair()
    evicted = second.node_id
    first.exits(0, 3)
    ends(first, -TERM)
    first.settle()
    second.write(Delete(KEYS.member(evicted)), Delete(KEYS.joined(1, evicted)))
    second.settle()
    ends(second, -TERM)

    words: list[str] = []
    done: list[Action] = []
    while second.answers:
        done += second.answer()
        words.append(second.said)
        done += second.look()
        words.append(second.said)

    assert [type(action) for action in done] == [Renew, Join]
    assert "the others waited too long for this node, and it lost its seat; it comes back as a new one" in words
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


def test_who_lost_an_election_to_one_that_has_left_since_is_not_evicted() -> None:
    first, second = pair()
    third = Driver(TWO, store=first.store, host="node-c", remote=True).begin()
    third.settle()
    first.lose_lease()
    late = second.looked
    third.settle()
    second.happen(late)
    second.write(Delete(KEYS.member(third.node_id)), Delete(KEYS.leader))

    second.settle()

    assert second.snapshot.leader == second.node_id
    assert second.incarnations == 1
    assert "lost its seat" not in second.said


def test_a_join_with_a_lease_that_has_ended_is_made_again_with_another() -> None:
    first = Driver(TWO, host="node-a").begin()
    first.settle()
    second = Driver(TWO, host="node-b", store=first.store, remote=True).begin()
    second.answer()
    second.store.revoke(second.lease)

    second.look()
    settle(first, second)

    assert isinstance(second.agent.phase, Running)
    assert second.incarnations == 2


# --- leading


def test_a_follower_that_becomes_leader_looks_at_everything_before_it_acts() -> None:
    first, second = pair()
    first.lose_lease()
    second.look()
    assert tags(second) == [Tag.ELECT]
    second.answer()

    widened = second.look()
    commits = second.commits
    acted = second.look()

    assert widened == [Widen()]
    assert commits == []
    assert tags(second) == [Tag.LEAD]
    assert acted == []
    assert second.snapshot.generation
    assert second.snapshot.generation.kind is OpenKind.LOSS


# --- going


def test_answers_to_what_is_not_awaited_change_nothing() -> None:
    driver = started()
    before = driver.agent

    assert driver.happen(Committed(Tag.JOIN, False, 99)) == []
    assert driver.agent == before


def test_the_terms_of_an_old_run_bind_nobody() -> None:
    old = started()
    old.store.revoke(old.lease)

    new = Driver(replace(SPEC, max_restarts=9), store=old.store, host="node-b").begin()
    new.settle()

    assert isinstance(new.agent.phase, Running)
    assert new.snapshot.terms
    assert new.snapshot.terms.max_restarts == 9


def test_who_lost_an_election_to_another_stays_who_it_is() -> None:
    first, second = pair()
    third = Driver(TWO, store=first.store, host="node-c", remote=True).begin()
    third.settle()
    first.lose_lease()
    late = second.looked
    third.settle()

    second.happen(late)
    second.settle()

    assert second.snapshot.leader == third.node_id
    assert second.incarnations == 1
    assert not second.agent.membership.outvoted


def test_followers_never_write_what_is_the_leaders() -> None:
    first, second = pair()
    second.lose_lease()

    second.settle()
    assert second.snapshot.generation
    assert second.snapshot.generation.number == 0
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
