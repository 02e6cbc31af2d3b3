"""rendezvous.rules.restart_policy: who is kept out, on which evidence, and who takes the place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.restart_policy import STREAK_AGE_MAX_S, assess, is_excluded
from elaunch.rendezvous.types import Exclusion, Failure, FailureKind, Node, Streak, Terms
from tests.unit.agent.job_world import TERMS, TIMES, A, B, C, World, node, running

SIGNAL, EXCEPTION = FailureKind.SIGNAL, FailureKind.EXCEPTION
# Two seats, a spare, and a budget that is larger than the evidence.
TWO = replace(TERMS, nodes_min=2, nodes_max=2, max_restarts=9, exclude_after=3)


def failing(world: World, who: object, kind: FailureKind = SIGNAL, times: int = 1, *rest: object) -> World:
    """`who` fails in so many generations; all join each time."""
    for _ in range(times):
        world.fail(kind, nodes=(who,))  # type: ignore[arg-type]
        world.run(A, B, C)
    return world


def three(terms: Terms = TWO) -> World:
    """A job on A and B; C is a spare."""
    world = running(A, B, terms=terms)
    world.join(C)
    return world


def test_a_spare_takes_the_place_of_a_node_that_fails_the_same_way_again_and_again() -> None:
    world = three()

    seated = [failing(world, B).seated for _ in range(3)]

    assert seated == ["ab", "ab", "ac"]
    assert world.table.reason == (
        "restart 3 of 9; host-b is excluded: the last 3 failures were all on host-b, and alike (signal)"
    )
    assert world.table.excluded == (
        Exclusion("host-b", "signal", "the last 3 failures were all on host-b, and alike (signal)"),
    )


def test_an_excluded_node_stays_out_after_failures_of_others_and_under_a_new_leader() -> None:
    world = failing(three(), B, times=3)
    failing(world, A, EXCEPTION)
    world.lose(A)
    world.elect(C)
    world.lead()

    world.run(B, C)

    # Only two are left for two seats.
    assert world.seated == "cb"
    assert "host-b would be excluded (--exclude-after), but too few other nodes are here" in world.table.reason
    assert is_excluded(B.node_id, world.table.excluded)


def test_an_excluded_node_that_is_ready_is_no_reason_to_open_a_generation() -> None:
    world = failing(three(replace(TWO, nodes_min=1, nodes_max=3)), B, times=3)
    assert world.seated == "ac"

    world.poll()
    world.now_s += TIMES.join_backoff_max_s

    assert not world.lead()


def test_an_excluded_node_that_is_late_is_not_waited_for() -> None:
    world = failing(three(replace(TWO, nodes_min=1, nodes_max=3)), B, times=3)
    world.fail(EXCEPTION, nodes=(A,))
    world.join(A, C)

    assert world.seal() == "ac"


def test_an_agent_that_is_started_again_on_the_host_is_excluded_too() -> None:
    world = failing(three(replace(TWO, nodes_min=1)), B, times=3)
    world.lose(B)
    again = replace(node("b"), node_id="host-b-0000beef")
    world.fail(SIGNAL, nodes=(A,))

    world.run(A, C, again)

    assert world.seated == "ac"


def test_with_too_few_others_no_node_is_excluded_and_the_reason_has_it() -> None:
    world = running(A, B, terms=TWO)
    for _ in range(3):
        world.fail(SIGNAL, nodes=(B,))
        world.run(A, B)

    assert world.seated == "ab"
    assert world.table.reason == (
        "restart 3 of 9; host-b would be excluded (--exclude-after), but too few other nodes are here"
    )


@pytest.mark.parametrize(
    "history",
    [
        [(B, SIGNAL), (A, SIGNAL), (B, SIGNAL), (B, SIGNAL)],
        [(B, SIGNAL), (B, EXCEPTION), (B, SIGNAL), (B, SIGNAL)],
        [(B, SIGNAL), (B, SIGNAL), (B, FailureKind.PEER_LOST)],
        [(B, FailureKind.PEER_LOST)] * 4,
        [(B, FailureKind.ENDED_EARLY), (A, SIGNAL), (B, FailureKind.ENDED_EARLY)],
    ],
    ids=["another node", "another way", "two and a lost peer", "lost peers", "ended early"],
)
def test_what_is_no_streak_excludes_no_node(history: list[tuple[object, FailureKind]]) -> None:
    world = three()

    for who, kind in history:
        failing(world, who, kind)

    assert world.seated == "ab"
    assert not world.table.excluded


@pytest.mark.parametrize(("is_blameless", "seated"), [(True, "ab"), (False, "ac")])
def test_a_hang_whose_rank_is_named_by_order_is_no_evidence_against_its_node(is_blameless: bool, seated: str) -> None:
    world = three()

    for _ in range(3):
        number = world.table.generation
        hung = Failure(FailureKind.HANG, number, B.node_id, B.host, 1, 0, 1, None, "hung", progressed=True)
        hung = replace(hung, is_blameless=is_blameless)
        world.commit(transactions.fail(world.snapshot, B, hung))
        world.run(A, B, C)

    assert world.seated == seated


def test_a_lost_peer_between_two_failures_does_not_end_a_streak() -> None:
    world = failing(three(), B, times=2)
    failing(world, A, FailureKind.PEER_LOST)
    failing(world, B)

    assert world.seated == "ac"


def test_a_lost_node_is_no_failure_of_another() -> None:
    world = failing(three(replace(TWO, nodes_min=1)), B, times=2)
    world.fail(SIGNAL, nodes=(B,))
    world.lose(A)
    world.elect(C)

    world.run(B, C)

    assert world.seated == "bc"
    assert world.table.streak == Streak("host-b", "signal", 2)


def test_a_generation_that_ran_for_an_hour_resets_the_streak() -> None:
    world = failing(three(), B, times=2)
    world.poll()
    world.now_s += STREAK_AGE_MAX_S

    failing(world, B)

    assert (world.seated, world.table.streak) == ("ab", Streak("host-b", "signal", 1))


def test_the_same_failure_on_another_node_acquits() -> None:
    world = failing(three(), B, times=3)

    failing(world, C)

    assert not world.table.excluded
    assert world.table.streak == Streak("host-c", "signal", 1)


def test_of_two_agents_on_one_host_only_the_failing_one_is_excluded() -> None:
    b1, b2 = node("b", host="host-a"), node("c", host="host-a")
    world = running(A, b1, terms=TWO)
    world.join(b2)
    for _ in range(3):
        world.fail(SIGNAL, nodes=(b1,))
        world.run(A, b1, b2)

    assert world.seated == "ac"
    assert world.table.excluded[0].who == b1.node_id


@pytest.mark.parametrize("terms", [replace(TWO, exclude_after=0), replace(TERMS, nodes_max=1, exclude_after=1)])
def test_without_the_option_and_on_one_node_none_is_excluded(terms: Terms) -> None:
    world = running(A, B, terms=terms) if terms.nodes_max > 1 else running(A, terms=terms)
    for _ in range(3):
        world.fail(SIGNAL, nodes=(A,))
        world.run(*((A, B, C) if terms.nodes_max > 1 else (A,)))

    assert (world.table.streak, world.table.excluded) == (None, ())
    assert world.table.reason == f"restart 3 of {terms.max_restarts}" + (", the last one" * (terms.max_restarts == 3))


def crash(world: World, *nodes: Node, exception: str = "E", kind: FailureKind = EXCEPTION) -> None:
    """The same error, before any progress, on each of these nodes; then all join."""
    g = world.table.generation
    for who in nodes:
        message, rank = f"raised {exception}: no GPU", world.table.group_rank(who.node_id) or 0
        failed = Failure(kind, g, who.node_id, who.host, rank, 0, 1, 1, message, exception, progressed=False)
        world.commit(transactions.fail(world.snapshot, who, failed))
    world.join(A, B, C)
    world.seal()


@pytest.mark.parametrize("exception", ["E", "ImportError", "ValueError"])
@pytest.mark.parametrize("exclude_after", [2, 3])
def test_a_node_that_fails_without_progress_is_excluded_before_the_job_is_given_up(
    exclude_after: int, exception: str
) -> None:
    world = three(replace(TWO, exclude_after=exclude_after))

    for _ in range(exclude_after):
        assert world.seated == "ab"
        crash(world, B, exception=exception)

    assert not world.ended
    assert world.seated == "ac"


TWICE = "it failed the same way twice in a row without progress"


def test_what_repeats_ends_the_job_without_the_option_and_with_too_few_others() -> None:
    without = three(replace(TWO, exclude_after=0))
    alone = running(A, B, C, terms=replace(TWO, nodes_min=3, nodes_max=3))

    for world in (without, alone):
        for _ in range(2):
            crash(world, B)

        assert world.ended.startswith(TWICE)


def test_a_bug_that_moves_to_the_next_node_ends_the_job() -> None:
    world = three()
    for _ in range(3):
        crash(world, B)
    assert world.seated == "ac"

    crash(world, C)

    assert world.ended.startswith(TWICE)


def test_a_bug_of_two_nodes_in_one_generation_is_no_evidence_against_one() -> None:
    world = three()

    crash(world, B, A, exception="ValueError")
    assert world.table.streak is None
    crash(world, B, A, exception="ValueError")

    assert world.ended.startswith(TWICE)


@pytest.mark.parametrize(("exclude_after", "goes_on"), [(1, True), (3, False)])
def test_a_failure_before_the_start_ends_the_job_unless_the_node_is_excluded_for_it(
    exclude_after: int, goes_on: bool
) -> None:
    world = three(replace(TWO, exclude_after=exclude_after))

    crash(world, B, exception="ModuleNotFoundError", kind=FailureKind.STARTUP)
    assert (not world.ended) is goes_on
    if goes_on:
        assert world.seated == "ac"
        crash(world, C, exception="ModuleNotFoundError", kind=FailureKind.STARTUP)

    assert world.ended.startswith("it never got past its start")


def test_an_excluded_node_that_runs_for_want_of_another_is_not_acquitted_by_its_own_failure() -> None:
    own, other = Exclusion("host-b", "signal", ""), Exclusion("host-c", "signal", "")
    before = replace(three().table, excluded=(own, other))
    failed = Failure(FailureKind.SIGNAL, before.generation, B.node_id, B.host, 1, 0, 1, 1, "was killed by SIGKILL")

    found = assess(TWO, before, [failed], {B.node_id, C.node_id}, 1.0)

    assert found.excluded == (own,)
