"""rendezvous.forming: the leader's rules, on real snapshots of a memory store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.forming import counted_restarts, join, lead, open_job
from elaunch.rendezvous.memory import MemoryStore
from elaunch.rendezvous.snapshot import Keys, Snapshot, read_snapshot
from elaunch.rendezvous.store import Txn
from elaunch.rendezvous.types import (
    Failure,
    FailureKind,
    Generation,
    JobSpec,
    Joined,
    Node,
    OpenKind,
    OutcomeKind,
    Program,
    ProgramKind,
    RankTable,
    Seat,
)
from elaunch.rendezvous.verdict import BARREN_MAX

KEYS = Keys("job")
SPEC = JobSpec("job", Program(ProgramKind.SCRIPT, "train.py"), nodes_min=1, nodes_max=3, max_restarts=3)
A, B, C, D = (Node(name, f"host-{name}", f"10.0.0.{n}", n, n) for n, name in enumerate("abcd", start=1))
NODES = (A, B, C, D)


class World:
    """A job's keys; `a` leads."""

    def __init__(self, spec: JobSpec = SPEC) -> None:
        self.store = MemoryStore()
        self.spec = spec
        self.commit(open_job(self.snapshot, spec, A))

    @property
    def snapshot(self) -> Snapshot:
        return read_snapshot(KEYS, self.store.read(KEYS.root))

    def commit(self, txn: Txn) -> bool:
        return self.store.commit(txn)

    def join(self, *nodes: Node) -> None:
        for node in nodes:
            self.commit(Txn((), {KEYS.member(node.node_id): encode(node)}))
            assert self.commit(join(self.snapshot, Joined(node.node_id, 29500 + node.slots)))

    def fail(self, *kinds: FailureKind, progressed: bool = True, node: Node = A) -> None:
        """Open the next generation with a failure of each kind in the current one."""
        table = self.snapshot.table
        assert table
        g = table.generation
        for n, kind in enumerate(kinds):
            by = node if n == 0 else NODES[n]
            record = Failure(kind, g, by.node_id, by.host, n, 0, 1, 1, f"{kind.value} {'x' * g}", progressed=progressed)
            self.commit(Txn((), {KEYS.failure(g, by.node_id): encode(record)}))
        self.commit(Txn((), {KEYS.generation: encode(Generation(g + 1, OpenKind.FAIL, "a failure"))}))

    def done(self, *nodes: Node) -> None:
        g = self.snapshot.generation
        assert g
        self.commit(Txn((), {KEYS.done(g.number, node.node_id): "" for node in nodes}))

    def lead(self, now_s: float = 0.0, restart_times_s: tuple[float, ...] = ()) -> bool:
        """Let the leader write what it wants; whether it wanted and could."""
        txn = lead(self.snapshot, A, restart_times_s, now_s)
        return txn is not None and self.commit(txn)

    @property
    def table(self) -> RankTable:
        table = self.snapshot.table
        assert table
        return table


def test_opening_a_job_writes_spec_member_leader_and_generation_nought() -> None:
    snapshot = World().snapshot

    assert snapshot.spec == SPEC
    assert (snapshot.leader, snapshot.members) == ("a", {"a": A})
    assert snapshot.generation == Generation(0, OpenKind.START, "the job starts")
    assert snapshot.table is None


def test_a_job_is_opened_once() -> None:
    world = World()

    assert not world.commit(open_job(Snapshot(KEYS), SPEC, B))
    assert world.snapshot.leader == "a"


def test_nothing_is_sealed_before_anybody_joined() -> None:
    assert not World().lead()


def test_the_first_table_seats_who_joined_in_the_order_of_their_names() -> None:
    world = World()
    world.join(B, A)

    assert world.lead()

    assert world.table == RankTable(
        0,
        (Seat("a", "host-a", 1, 0), Seat("b", "host-b", 2, 1)),
        master_addr="10.0.0.1",
        master_port=29501,
        reason="the job starts",
    )
    assert world.table.world_size == 3


def test_only_the_leader_writes() -> None:
    world = World()
    world.join(A, B)

    assert lead(world.snapshot, B, (), 0.0) is None
    assert lead(world.snapshot, A, (), 0.0) is not None


def test_below_the_smallest_number_of_nodes_nothing_is_sealed() -> None:
    world = World(replace(SPEC, nodes_min=2))
    world.join(A)

    too_few = world.lead()
    world.join(B)

    assert (too_few, world.lead()) == (False, True)


def test_more_nodes_than_seats_stay_without_one() -> None:
    world = World()
    world.join(D, C, B, A)

    world.lead()

    assert [seat.node_id for seat in world.table.seats] == ["a", "b", "c"]
    assert world.table.group_rank("d") is None


def test_a_generation_has_one_table() -> None:
    world = World()
    world.join(A)
    first = lead(world.snapshot, A, (), 0.0)
    world.join(B)
    second = lead(world.snapshot, A, (), 0.0)

    assert first
    assert second
    assert [world.commit(first), world.commit(second)] == [True, False]
    assert lead(world.snapshot, A, (), 0.0) is None


def test_a_table_is_sealed_only_while_its_generation_is_the_current_one() -> None:
    world = World()
    world.join(A)
    late = lead(world.snapshot, A, (), 0.0)
    world.commit(Txn((), {KEYS.generation: encode(Generation(1, OpenKind.FAIL, "moved"))}))

    assert late
    assert not world.commit(late)


def test_a_word_for_an_old_generation_is_refused() -> None:
    world = World()
    old = join(world.snapshot, Joined("a", 1))
    world.commit(Txn((), {KEYS.generation: encode(Generation(1, OpenKind.FAIL, "moved"))}))

    assert not world.commit(old)


def test_who_joined_without_being_a_member_gets_no_seat() -> None:
    world = World()
    world.join(A, B)
    world.commit(Txn((), deletes=(KEYS.member("b"),)))

    world.lead()

    assert [seat.node_id for seat in world.table.seats] == ["a"]


def test_the_next_generation_waits_for_every_survivor() -> None:
    world = World()
    world.join(A, B)
    world.lead()
    world.fail(FailureKind.SIGNAL)

    world.join(A, C)
    without_b = world.lead()
    world.join(B)

    assert (without_b, world.lead()) == (False, True)


def test_survivors_keep_their_order_and_newcomers_come_last() -> None:
    world = World()
    world.join(B, C)
    world.lead()
    world.fail(FailureKind.SIGNAL, node=B)

    world.join(A, C, B)
    world.lead()

    seats = world.table.seats
    assert [(seat.node_id, seat.first_rank) for seat in seats] == [("b", 0), ("c", 2), ("a", 5)]
    assert world.table.master_addr == "10.0.0.2"


def test_a_node_that_is_gone_is_not_waited_for() -> None:
    world = World()
    world.join(A, B)
    world.lead()
    world.fail(FailureKind.SIGNAL)
    world.commit(Txn((), deletes=(KEYS.member("b"),)))

    world.join(A)

    assert world.lead()
    assert [(seat.node_id, seat.first_rank) for seat in world.table.seats] == [("a", 0)]


def test_ranks_are_without_holes_at_any_number_of_slots() -> None:
    world = World()
    world.join(A, B, C)

    world.lead()

    ranks = [seat.first_rank + n for seat in world.table.seats for n in range(seat.slots)]
    assert ranks == list(range(world.table.world_size)) == list(range(6))


def test_a_failure_counts_and_the_table_says_which_restart_it_is() -> None:
    world = World()
    world.join(A)
    world.lead()
    world.fail(FailureKind.SIGNAL)

    world.join(A)
    world.lead()

    assert (world.table.generation, world.table.restarts) == (1, 1)
    assert world.table.reason == "restart 1 of 3"


def test_sealing_clears_what_is_older_but_failures() -> None:
    world = World()
    world.join(A)
    world.lead()
    world.done(A)
    world.fail(FailureKind.SIGNAL)
    world.join(A)

    world.lead()

    snapshot = world.snapshot
    assert (set(snapshot.tables), set(snapshot.joined), set(snapshot.done)) == ({1}, {1}, set())
    assert set(snapshot.failures) == {0}


def test_a_spent_budget_ends_the_job_with_the_failure_that_spent_it() -> None:
    world = World(replace(SPEC, max_restarts=1))
    for _ in range(2):
        world.join(A)
        world.lead()
        world.fail(FailureKind.SIGNAL)
    world.join(A)

    world.lead()

    ended = world.snapshot.ended
    assert ended
    assert (ended.kind, ended.exit_code) == (OutcomeKind.FAILED, 1)
    assert "1 restart" in ended.reason
    assert (ended.generation, ended.restarts, ended.max_restarts) == (1, 1, 1)
    assert ended.failure
    assert ended.failure.generation == 1


def test_the_end_names_the_cause_and_not_the_lost_peer_that_was_recorded_first() -> None:
    world = World(replace(SPEC, max_restarts=0))
    world.join(A, B)
    world.lead()
    world.fail(FailureKind.PEER_LOST, FailureKind.OUT_OF_MEMORY)
    world.join(A, B)

    world.lead()

    ended = world.snapshot.ended
    assert ended
    assert ended.failure
    assert ended.failure.kind is FailureKind.OUT_OF_MEMORY


def test_a_start_up_failure_ends_the_job_only_if_no_generation_ever_progressed() -> None:
    fresh, grown = World(), World()
    grown.join(A)
    grown.lead()
    grown.fail(FailureKind.SIGNAL, progressed=True)
    for world in (fresh, grown):
        world.join(A)
        world.lead()
        world.fail(FailureKind.STARTUP, progressed=False)
        world.join(A)

        world.lead()

    assert fresh.snapshot.ended
    assert not grown.snapshot.ended


def test_generations_in_a_row_without_progress_are_counted_and_end_the_job() -> None:
    world = World(replace(SPEC, max_restarts=100))
    world.join(A)
    world.lead()

    barren = [world.table.barren]
    while not world.snapshot.ended:
        world.fail(FailureKind.SIGNAL, progressed=False)
        world.join(A)
        world.lead()
        barren.append(world.table.barren)

    assert barren == [*range(BARREN_MAX), BARREN_MAX - 1]


def test_progress_starts_the_count_of_barren_generations_again() -> None:
    world = World()
    world.join(A)
    world.lead()

    barren = []
    for progressed in (False, False, True):
        world.fail(FailureKind.SIGNAL, progressed=progressed)
        world.join(A)
        world.lead()
        barren.append(world.table.barren)

    assert barren == [1, 2, 0]


def test_all_done_ends_the_job_in_success() -> None:
    world = World()
    world.join(A, B)
    world.lead()

    world.done(A)
    one = world.lead()
    world.done(B)
    both = world.lead()

    ended = world.snapshot.ended
    assert (one, both) == (False, True)
    assert ended
    assert (ended.kind, ended.exit_code, ended.failure) == (OutcomeKind.SUCCEEDED, 0, None)


def test_a_job_ends_once() -> None:
    world = World()
    world.join(A)
    world.lead()
    world.done(A)
    late = lead(world.snapshot, A, (), 0.0)
    world.lead()

    assert late
    assert not world.commit(late)
    assert lead(world.snapshot, A, (), 0.0) is None
    assert not world.commit(join(world.snapshot, Joined("b", 1)))


def test_a_success_is_not_written_over_a_failure_that_opened_a_generation_meanwhile() -> None:
    world = World()
    world.join(A)
    world.lead()
    world.done(A)
    late = lead(world.snapshot, A, (), 0.0)
    world.fail(FailureKind.SIGNAL)

    assert late
    assert not world.commit(late)


@pytest.mark.parametrize(
    ("window_s", "now_s", "expected"), [(None, 1000.0, 2), (10.0, 21.0, 2), (10.0, 25.0, 1), (10.0, 30.0, 0)]
)
def test_the_budget_holds_the_restarts_of_its_window_or_all(
    window_s: float | None, now_s: float, expected: int
) -> None:
    spec = replace(SPEC, restart_window_s=window_s)
    table = RankTable(2, (), "a", 1, "", restarts=2)

    assert counted_restarts(spec, table, (12.0, 20.0), now_s) == expected


def test_old_restarts_do_not_spend_a_budget_with_a_window() -> None:
    worlds = [World(replace(SPEC, max_restarts=1, restart_window_s=10.0)) for _ in range(2)]
    for world in worlds:
        for _ in range(2):
            world.join(A)
            world.lead()
            world.fail(FailureKind.SIGNAL)
        world.join(A)

    worlds[0].lead(now_s=105.0, restart_times_s=(100.0,))
    worlds[1].lead(now_s=115.0, restart_times_s=(100.0,))

    assert worlds[0].snapshot.ended
    assert not worlds[1].snapshot.ended
    assert worlds[1].table.restarts == 2
