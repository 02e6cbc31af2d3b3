"""The transactions of a job of 4096 nodes with the longest names and a failure each: etcd takes them all.

It takes requests of 1.5 MiB, and 128 entries in each list of a transaction: guards, then, otherwise.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache

import pytest

from elaunch.rendezvous.codec import RUN_ID_BYTES_MAX
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.leader import LeaderState, lead
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot, seats_of
from elaunch.rendezvous.rules.transactions import open_loss
from elaunch.rendezvous.store import Delete, Put, Txn
from elaunch.rendezvous.types import (
    Failure,
    FailureKind,
    Generation,
    JobSpec,
    Joined,
    Node,
    OpenKind,
    Outcome,
    OutcomeKind,
    Program,
    ProgramKind,
    RankTable,
)
from tests.etcd import Etcd, client
from tests.unit.agent.job_world import TIMES

NODES = 4096
REQUEST_BYTES_MAX = 3 << 19
LIST_MAX = 128
# What the wire adds to each entry of a list, with room.
ENTRY_BYTES = 64
NOW_S, LATER_S = 100.0, 1e6
G = 100
DICE = random.Random(4096)
LONG = "é" * 5_000_000
# In a key each of its bytes takes three.
KEYS = Keys("é" * (RUN_ID_BYTES_MAX // 2))


def node(number: int) -> Node:
    """A node that shares nothing with others, so that a table of many cannot be packed well."""
    host = "".join(DICE.choices(string.ascii_lowercase + string.digits, k=255))
    node_id = f"{host}-{DICE.getrandbits(32):08x}"
    role = "".join(DICE.choices(string.ascii_letters + string.digits, k=64))
    return Node(node_id, host, host, 1 + number % 2, LONG, role, -1, LONG)


@cache
def everyone() -> dict[str, Node]:
    """All nodes of the job."""
    return {each.node_id: each for each in map(node, range(NODES))}


def me() -> Node:
    """The leader, which also is the node that joins, fails and leaves."""
    return next(iter(everyone().values()))


TERMS = replace(JobSpec("job", Program(ProgramKind.SCRIPT, LONG)).terms, nodes_max=NODES, max_restarts=10**6)


def failure(of: Node, generation: int) -> Failure:
    texts = LONG, LONG, LONG, LONG, LONG, LONG, LONG
    return Failure(FailureKind.EXCEPTION, generation, of.node_id, of.host, 1, 1, 1, 1, *texts, progressed=True)


@cache
def one() -> Failure:
    return failure(me(), G)


@cache
def many() -> tuple[Failure, ...]:
    """A failure of each node. They are alike but for their node: that is quick to make."""
    return tuple(replace(one().one_of(NODES), node_id=node_id) for node_id in everyone())


def snapshot(kind: OpenKind = OpenKind.FAIL, *, forming: bool = True, gone: bool = False) -> Snapshot:
    """Of a job that has failed many times: generation G ran with all nodes, the next one forms."""
    table = RankTable(
        G, seats_of([(n.node_id, n.slots, n.role) for n in everyone().values()]), LONG, 1, LONG, restarts=G
    )
    number = G + 1 if forming else G
    return Snapshot(
        KEYS,
        revision=10**9,
        whole=True,
        terms=TERMS,
        lease=1,
        generation=Generation(number, kind, LONG, me().node_id),
        generation_revision=10**9,
        leader=me().node_id,
        leader_revision=10**9,
        members={me().node_id: me()} if gone else everyone(),
        joined={number: {node_id: Joined(node_id, 65535) for node_id in everyone()}},
        failures=dict.fromkeys(range(G + 1), many()),
        tables={G: table},
    )


def led(seen: Snapshot) -> Txn:
    first = lead(seen, LeaderState(), TIMES, NOW_S, 0.0, 0.0)
    txn = first.txn or lead(seen, first.leader_state, TIMES, LATER_S, 0.0, 0.0).txn
    assert txn
    return txn


def all_done() -> Snapshot:
    return replace(snapshot(forming=False), done={G: frozenset(everyone())})


def too_few() -> Snapshot:
    seen = snapshot(OpenKind.LEAVE, gone=True)
    return replace(seen, terms=replace(TERMS, nodes_min=2), joined={G + 1: {me().node_id: Joined(me().node_id, 1)}})


def waiting() -> Snapshot:
    """Half of the nodes have a seat, and as many wait for one."""
    seen = snapshot(forming=False)
    assert seen.table
    return replace(seen, tables={G: replace(seen.table, seats=seen.table.seats[: NODES // 2])})


def given_up() -> Snapshot:
    return replace(snapshot(), terms=replace(TERMS, max_restarts=0))


def slow() -> Snapshot:
    return replace(snapshot(), joined={G + 1: {me().node_id: Joined(me().node_id, 1)}})


MADE = {
    "a table of all is sealed": lambda: led(snapshot()),
    "all but one are lost while they run": lambda: led(snapshot(forming=False, gone=True)),
    "all are lost at once": lambda: open_loss(snapshot(forming=False), list(everyone())),
    "all but one are lost while they stop to save": lambda: led(snapshot(OpenKind.JOIN, gone=True)),
    "half of all wait to join": lambda: led(waiting()),
    "one of all is evicted": lambda: led(slow()),
    "the budget is spent": lambda: led(given_up()),
    "too few are left": lambda: led(too_few()),
    "all are done": lambda: led(all_done()),
    "a run is started over the old one": lambda: transactions.start_run(snapshot(), TERMS, me(), 1),
    "a node joins": lambda: transactions.join(snapshot(), me(), Joined(me().node_id, 1), 1, is_member=False),
    "a node fails": lambda: transactions.fail(snapshot(forming=False), me(), one()),
    "a node's record is completed": lambda: transactions.complete(snapshot(), me(), one()),
    "a node leaves": lambda: transactions.leave(snapshot(forming=False), me(), opens=True, why=LONG),
    "a person ends the job": lambda: transactions.end_job(
        snapshot(), Outcome(OutcomeKind.FAILED, LONG, G, 1, 1, one())
    ),
}


def content_bytes(txn: Txn) -> int:
    """Bytes of the transaction's keys and values."""
    guards = sum(len(getattr(guard, "key", getattr(guard, "prefix", "")).encode()) for guard in txn.guards)
    ops = (*txn.then, *txn.otherwise)
    return guards + sum(
        len(op.key.encode()) + len((op.value if isinstance(op, Put) else op.end).encode()) for op in ops
    )


@pytest.fixture(scope="module")
def made() -> dict[str, Txn]:
    return {what: make() for what, make in MADE.items()}


@pytest.mark.parametrize("what", MADE)
def test_a_transaction_of_4096_nodes_is_one_that_etcd_takes(what: str, made: dict[str, Txn]) -> None:
    txn = made[what]

    lists = len(txn.guards), len(txn.then), len(txn.otherwise)
    assert max(lists) <= LIST_MAX, lists
    assert content_bytes(txn) + ENTRY_BYTES * sum(lists) <= REQUEST_BYTES_MAX


@pytest.mark.parametrize("what", [what for what in MADE if what != "a table of all is sealed"])
def test_only_a_table_grows_with_the_job_and_nothing_with_programs_texts(what: str, made: dict[str, Txn]) -> None:
    assert content_bytes(made[what]) <= 256 << 10


def test_a_leader_that_finds_a_record_of_each_node_in_each_generation_tidies_them_all(made: dict[str, Txn]) -> None:
    seal = made["a table of all is sealed"]

    deletes = [op for op in seal.then if isinstance(op, Delete) and "/failures/" in op.key]
    kept = [KEYS.failure(g, me().node_id) for g in (0, G)]
    gone = [KEYS.failure(g, node_id) for g in range(G + 1) for node_id in everyone()]
    assert [key for key in gone if not any(op.key <= key < op.end for op in deletes)] == sorted(kept)


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd("3.5") as server:
        yield server


@pytest.mark.parametrize("what", ["a table of all is sealed", "all are lost at once", "a node fails"])
def test_a_real_etcd_takes_it(what: str, etcd: Etcd, made: dict[str, Txn]) -> None:
    """The transaction's guards do not hold. A transaction that is too large is refused before that."""
    txn = made[what]
    with closing(client(etcd.addresses, deadline_s=10.0)) as store:
        store.grant(1, 60)

        assert not store.commit(txn).held
        assert store.commit(replace(txn, guards=())).held

        table = store.read(KEYS.control).entries
        puts = [op for op in txn.then if isinstance(op, Put) and op.key in table]
        assert [table[op.key].value for op in puts] == [op.value for op in puts]
