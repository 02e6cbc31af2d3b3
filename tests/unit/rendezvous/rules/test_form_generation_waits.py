"""rendezvous.rules.form_generation: waits for nodes (rules 1, 2, 6, 7 and 8 of docs/protocol.md)."""

from __future__ import annotations

from dataclasses import replace

from elaunch.rendezvous.rules.leader import lead
from elaunch.rendezvous.rules.snapshot import Keys
from elaunch.rendezvous.store import Put
from elaunch.rendezvous.types import FailureKind, OpenKind, OutcomeKind, Terms
from tests.unit.agent.job_world import KEYS, TERMS, TIMES, A, B, C, World, forming, node, running

SIGNAL = FailureKind.SIGNAL


# --- 1: every survivor is waited for


def test_the_next_generation_waits_for_every_survivor() -> None:
    world = forming(A, B)
    world.join(A, C)

    without_b = world.poll()
    world.join(B)

    assert without_b.txn is None
    assert without_b.waiting == "host-b to stop its workers"
    assert world.seal() == "abc"


def test_a_spare_is_not_seated_over_a_slow_survivor_though_that_makes_the_number_full() -> None:
    world = running(A, B, terms=replace(TERMS, nodes_max=2))
    world.join(C)
    world.fail(SIGNAL)
    world.join(A, C)

    assert world.seal() == ""
    world.join(B)
    assert world.seal() == "ab"


def test_who_joined_without_being_a_member_any_more_gets_no_seat() -> None:
    world = forming(A, B)
    world.join(A, B)
    world.evict(B)

    assert world.seal() == "a"


def test_where_members_of_the_table_are_gone_while_the_others_stop_to_save_the_stop_is_made_urgent() -> None:
    world = running(A, B, C)
    world.leave(B)
    world.lose(C)

    assert world.lead()

    assert (world.number, world.generation.kind) == (2, OpenKind.LOSS)
    assert world.generation.cause == "host-b leaves (SIGTERM was received); host-c left too, or was lost"


def test_who_was_cut_off_itself_seals_no_table_before_the_others_could_come_back() -> None:
    world = forming(A, B)
    world.lose(A, B)
    # Everybody was away for longer than a lease: they come back as new nodes, one after the other.
    first, second = node("y"), node("z")
    world.join(first)
    world.elect(first)
    world.lossless_until_s = world.now_s + TIMES.return_grace_s

    early = world.poll()
    world.join(second)
    world.now_s = world.lossless_until_s

    assert (early.txn, early.wake_s) == (None, world.lossless_until_s)
    assert early.waiting == "host-a, host-b to reconnect"
    assert world.seal() == "yz"


def test_with_as_many_nodes_as_seats_no_other_is_waited_for() -> None:
    world = forming(A, B, terms=replace(TERMS, nodes_max=2))
    world.lose(A, B)
    first, second = node("y"), node("z")
    world.join(first, second)
    world.elect(first)
    world.lossless_until_s = world.now_s + TIMES.return_grace_s

    assert world.seal() == "yz"


def test_a_leader_that_was_cut_off_hurries_no_node_that_stops_to_save() -> None:
    world = running(A, B, C)
    world.leave(B)
    world.lose(C)
    world.lossless_until_s = world.now_s + TIMES.return_grace_s

    early = world.poll()
    world.now_s = world.lossless_until_s

    assert (early.txn, early.wake_s) == (None, world.lossless_until_s)
    assert world.lead()
    assert world.number == 2


def test_neither_who_left_nor_who_was_done_is_waited_for_to_come_back() -> None:
    world = running(A, B, C)
    world.finish(C)
    world.lose(C)
    world.leave(B)
    world.lossless_until_s = world.now_s + TIMES.return_grace_s
    world.join(A)

    assert world.seal() == "a"


# --- 2: who was ready before is waited for


def test_with_a_free_seat_the_spare_of_a_moment_ago_is_waited_for() -> None:
    world = running(A, B, terms=replace(TERMS, nodes_max=2))
    world.join(C)
    world.lose(B)
    world.lead()
    world.join(A)

    early = world.poll()
    world.now_s += 0.5
    world.join(C)

    assert early.txn is None
    assert (early.waiting, early.wake_s) == ("the spare host-c", 100.0 + TIMES.spare_wait_s)
    assert world.seal() == "ac"


def test_a_spare_that_does_not_come_is_waited_for_that_long_and_no_longer() -> None:
    world = running(A, B, terms=replace(TERMS, nodes_max=2))
    world.join(C)
    world.lose(B)
    world.lead()
    world.join(A)
    world.poll()

    world.now_s += TIMES.spare_wait_s

    assert world.seal() == "a"


def test_the_wait_for_spares_begins_when_the_survivors_have_joined() -> None:
    world = running(A, B, terms=replace(TERMS, nodes_max=2))
    world.join(C)
    world.lose(B)
    world.lead()
    world.poll()
    world.now_s += 20
    world.join(A)

    assert world.poll().wake_s == 120.0 + TIMES.spare_wait_s


def test_without_a_free_seat_no_spare_is_waited_for() -> None:
    world = running(A, B, terms=replace(TERMS, nodes_max=2))
    world.join(C)
    world.fail(SIGNAL)
    world.join(A, B)

    assert world.seal() == "ab"


def test_a_spare_that_is_gone_is_not_waited_for() -> None:
    world = running(A, B, terms=replace(TERMS, nodes_max=2))
    world.join(C)
    world.lose(B, C)
    world.lead()
    world.join(A)

    assert world.seal() == "a"


def test_who_was_ready_for_a_generation_that_was_never_sealed_is_waited_for_too() -> None:
    world = running(A, B, terms=replace(TERMS, nodes_max=2))
    world.leave(B)
    world.join(C)
    world.write(Put(KEYS.generation, '{"number":2,"kind":"loss","cause":"host-x was lost"}'))
    world.join(A)

    assert world.poll().waiting == "the spare host-c"


# --- 6: too few nodes


LOST = "; host-b was lost: no heartbeat from the elaunch that ran there"


def test_below_the_smallest_number_of_nodes_nothing_is_sealed() -> None:
    world = World(replace(TERMS, nodes_min=2))
    world.join(A)

    early = world.poll()
    world.join(B, C)

    assert early.txn is None
    assert early.waiting == "nodes: 1 of at least 2 is here (gives up after 600 s)"
    assert early.wake_s == 100.0 + TIMES.join_timeout_s
    assert world.seal() == "abc"


def test_too_few_nodes_for_the_join_timeout_end_the_job_with_the_way_out() -> None:
    world = World(Terms(3, 3))
    world.join(A, B)
    assert world.poll().waiting == "nodes: 2 of 3 are here (gives up after 600 s)"

    world.now_s += TIMES.join_timeout_s
    world.seal()

    ended = world.snapshot.ended
    assert ended
    assert (ended.kind, ended.exit_code, ended.failure) == (OutcomeKind.FAILED, 1, None)
    assert ended.reason.startswith(
        "after 600 s the job still waits for nodes: 2 of 3 are here; start elaunch on the others"
    )
    assert "join_timeout" in ended.reason


def test_who_waits_under_a_prefix_names_it_since_a_node_with_another_never_comes() -> None:
    world = World(Terms(2, 2))
    world.join(A)
    elsewhere = replace(world.snapshot, keys=Keys("job", "/teams/nlp/"))

    waits = lead(elsewhere, world.leader_state, TIMES, 100.0, 0.0, 0.0)
    over = lead(elsewhere, waits.leader_state, TIMES, 100.0 + TIMES.join_timeout_s, 0.0, 0.0)

    assert waits.waiting == "nodes: 1 of 2 is here under etcd_prefix=/teams/nlp/ (gives up after 600 s)"
    assert over.txn
    (ended,) = (op for op in over.txn.then if isinstance(op, Put))
    assert "after 600 s the job still waits for nodes: 1 of 2 is here under etcd_prefix=/teams/nlp/" in ended.value


def test_nodes_that_come_and_go_do_not_put_off_the_join_timeout() -> None:
    world = World(Terms(3, 3))
    world.join(A)
    world.poll()
    for _ in range(3):
        world.now_s += TIMES.join_timeout_s / 3
        world.join(B)
        world.poll()
        world.lose(B)

    assert world.seal() == ""
    assert world.ended


def test_the_join_timeout_begins_when_the_survivors_have_stopped_their_workers() -> None:
    world = forming(A, B, terms=Terms(2, 2))
    world.times = replace(TIMES, join_timeout_s=2.0)
    world.lose(B)
    world.poll()
    world.now_s += 20
    world.join(A)

    assert world.poll().waiting == "nodes: 1 of 2 is here (gives up after 2 s)" + LOST
    world.now_s += 2
    world.seal()
    assert world.ended.startswith(
        f"after 2 s the job still waits for nodes: 1 of 2 is here{LOST}; start elaunch on the others"
    )


def test_who_waits_for_another_node_names_the_one_that_left() -> None:
    world = running(A, B, terms=Terms(2, 2))
    world.leave(B)
    world.join(A)

    left = "; host-b leaves (SIGTERM was received)"
    assert world.poll().waiting == "nodes: 1 of 2 is here (gives up after 600 s)" + left


# --- 7: a last call for the first table


def test_a_first_table_with_free_seats_waits_for_a_last_call() -> None:
    world = World(replace(TERMS, nodes_min=2))
    world.join(A, B)

    early = world.poll()
    world.now_s += TIMES.last_call_s

    assert early.txn is None
    assert early.waiting == "more nodes, 2 s: 2 of at most 3 are here"
    assert early.wake_s == 100.0 + TIMES.last_call_s
    assert world.seal() == "ab"


def test_arrivals_do_not_extend_the_last_call() -> None:
    world = World(replace(TERMS, nodes_max=4))
    world.join(A)
    world.poll()
    world.now_s += 1.5
    world.join(B)

    assert world.poll().wake_s == 100.0 + TIMES.last_call_s
    world.now_s += 0.5
    assert world.seal() == "ab"


def test_a_last_call_begins_when_there_are_enough() -> None:
    world = World(replace(TERMS, nodes_min=2))
    world.join(A)
    world.poll()
    world.now_s += 50
    world.join(B)

    assert world.poll().wake_s == 150.0 + TIMES.last_call_s


def test_the_last_call_is_over_when_all_are_here_that_a_scheduler_started() -> None:
    world = World(Terms(1, 4), times=replace(TIMES, nodes_expected=3))
    world.join(A, B)

    early = world.poll()
    world.join(C)

    assert early.waiting == "more nodes, 2 s: 2 of at most 3 are here"
    assert world.seal() == "abc"


def test_later_tables_have_no_last_call() -> None:
    world = forming(A, B)
    world.join(A, B)

    assert world.seal() == "ab"


# --- 8: who neither stops nor goes


def test_a_survivor_that_neither_joins_nor_goes_is_evicted() -> None:
    world = forming(A, B)
    world.join(A)
    asked_s = world.now_s
    early = world.poll()
    world.now_s += TIMES.form_deadline_s

    sealed = world.seal()

    assert early.wake_s == asked_s + TIMES.form_deadline_s
    assert sealed == "a"
    assert B.node_id not in world.snapshot.members
    assert world.table.restarts == 0


def test_who_joins_just_before_its_eviction_stays() -> None:
    world = forming(A, B)
    world.join(A)
    world.poll()
    world.now_s += TIMES.form_deadline_s
    eviction = world.poll().txn
    world.join(B)

    assert eviction
    assert not world.commit(eviction)
    assert world.seal() == "ab"


def test_no_node_is_evicted_while_none_waits_for_it() -> None:
    world = forming(A, B)
    world.poll()
    world.now_s += 10 * TIMES.form_deadline_s

    led = world.poll()

    assert (led.txn, led.wake_s) == (None, None)
    world.join(A, B)
    assert world.seal() == "ab"
