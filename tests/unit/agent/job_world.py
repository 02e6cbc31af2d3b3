"""A job's keys on a memory store, nodes that act when the test says so, and a leader whose clock only tests move."""

from __future__ import annotations

from elaunch.rendezvous.engine import MemoryStore
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.leader import Lead, LeaderState, lead
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot, SnapshotReader
from elaunch.rendezvous.store import Delete, LeaseGone, Op, Txn
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Failure, FailureKind, Generation, Joined, Node, RankTable, Terms

KEYS = Keys("job")
TERMS = Terms(nodes_min=1, nodes_max=3, max_restarts=3)
TIMES = Times()
PORT = 29500


def node(letter: str, slots: int = 1, *, node_rank: int = -1, topology: str = "", host: str = "") -> Node:
    host = host or f"host-{letter}"
    number = ord(letter)
    node_id = f"{host}-{number:08x}"
    return Node(node_id, host, f"10.0.0.{number}", slots, f"boot:{number}:1", "default", node_rank, topology)


A, B, C, D = (node(letter, slots) for slots, letter in enumerate("abcd", start=1))


def begin_run_lease(store: MemoryStore, txn: Txn) -> None:
    """Begin the run's lease, as the store's client does for a transaction that starts a run."""
    if lease := transactions.run_lease(KEYS, txn):
        store.grant(lease, TIMES.keys_ttl_s)


class World:
    """A job in which node `A` starts the run and leads, until another node is elected."""

    def __init__(self, terms: Terms = TERMS, *, first: Node = A, times: Times = TIMES) -> None:
        self.store = MemoryStore()
        self.times = times
        self.terms = terms
        self.now_s = 100.0
        self.leader_state = LeaderState()
        self.lossless_until_s = 0.0
        self.table_seen: tuple[int, float] = (-1, 0.0)
        self._leases: dict[str, int] = {}
        self.start(first)

    @property
    def snapshot(self) -> Snapshot:
        return SnapshotReader(KEYS).read(self.store.read(KEYS.root), whole=True)

    @property
    def table(self) -> RankTable:
        table = self.snapshot.table
        assert table
        return table

    @property
    def seated(self) -> str:
        """The letters of the newest table's nodes, in rank order."""
        return "".join(chr(int(seat.node_id[-8:], 16)) for seat in self.table.seats)

    @property
    def generation(self) -> Generation:
        """The newest generation."""
        generation = self.snapshot.generation
        assert generation
        return generation

    @property
    def number(self) -> int:
        """The number of the newest generation."""
        return self.generation.number

    @property
    def ended(self) -> str:
        """The reason of the job's end. Empty while the job goes on."""
        return self.snapshot.ended.reason if self.snapshot.ended else ""

    def lease(self, who: Node) -> int:
        if who.node_id not in self._leases:
            self._leases[who.node_id] = len(self._leases) + 1
            self.store.grant(self._leases[who.node_id], TIMES.lease_ttl_s)
        return self._leases[who.node_id]

    def commit(self, txn: Txn) -> bool:
        return self.store.commit(txn).held

    def write(self, *ops: Op) -> None:
        """Write without guards."""
        self.store.commit(Txn((), ops))

    # Actions of nodes.

    def start(self, who: Node) -> bool:
        txn = transactions.start_run(self.snapshot, self.terms, who, self.lease(who))
        begin_run_lease(self.store, txn)
        return self.commit(txn)

    def join(self, *nodes: Node, progressed: bool = False) -> bool:
        """Have nodes join the newest generation, also nodes that are no members yet. Returns whether all could."""
        held = True
        for who in nodes:
            is_member = who.node_id in self.snapshot.members
            joined = Joined(who.node_id, PORT + who.slots, progressed)
            held &= self.commit(transactions.join(self.snapshot, who, joined, self.lease(who), is_member=is_member))
        return held

    def fail(self, *kinds: FailureKind, progressed: bool = True, nodes: tuple[Node, ...] = (A, B, C)) -> None:
        """Write a failure of each kind in the running generation, on one node each. The first opens a generation."""
        g = self.table.generation
        for rank, (kind, who) in enumerate(zip(kinds, nodes, strict=False)):
            message = f"{kind.value} {'x' * g}"
            failed = Failure(kind, g, who.node_id, who.host, rank, 0, 1, 1, message, progressed=progressed)
            self.commit(transactions.fail(self.snapshot, who, failed))

    def leave(self, who: Node) -> None:
        """Have a node leave, as after SIGTERM."""
        table = self.snapshot.current_table
        opens = table is not None and table.group_rank(who.node_id) is not None
        self.commit(transactions.leave(self.snapshot, who, opens=opens, why="SIGTERM was received"))

    def finish(self, *nodes: Node) -> None:
        for who in nodes:
            self.commit(transactions.report_done(self.snapshot, who, self.number))

    def lose(self, *nodes: Node) -> None:
        """End the leases of these nodes."""
        for who in nodes:
            self.store.revoke(self._leases.pop(who.node_id))

    def evict(self, who: Node) -> None:
        self.write(Delete(KEYS.member(who.node_id)))

    def elect(self, who: Node) -> bool:
        """Have a node become leader. Returns whether it did. A new leader remembers nothing."""
        try:
            elected = self.commit(transactions.become_leader(self.snapshot, who, self.lease(who)))
        except LeaseGone:
            return False
        if elected:
            self.leader_state, self.table_seen = LeaderState(), (-1, 0.0)
        return elected

    # Actions of the leader.

    def poll(self) -> Lead:
        """The leader's decision now, which is not carried out."""
        snapshot = self.snapshot
        if snapshot.table and snapshot.table.generation != self.table_seen[0]:
            self.table_seen = (snapshot.table.generation, self.now_s)
        table_age_s = self.now_s - self.table_seen[1]
        led = lead(snapshot, self.leader_state, self.times, self.now_s, table_age_s, self.lossless_until_s)
        self.leader_state = led.leader_state
        return led

    def lead(self) -> bool:
        """Let the leader act once. Returns whether it wrote something."""
        led = self.poll()
        return led.txn is not None and self.commit(led.txn)

    def seal(self) -> str:
        """Let the leader write until it has nothing more to write. Returns the nodes that have a seat then."""
        while self.lead():
            pass
        current = self.snapshot.current_table
        return self.seated if current else ""

    def run(self, *nodes: Node, progressed: bool = True) -> None:
        """These nodes join, all waits end, and the table is sealed. `progressed` is about the generation before."""
        self.join(*nodes, progressed=progressed)
        self.seal()
        led = self.poll()
        if self.snapshot.current_table is None and led.wake_s is not None:
            self.now_s = led.wake_s
            self.seal()
        assert self.snapshot.current_table, "nothing was sealed"


def running(*nodes: Node, terms: Terms = TERMS) -> World:
    """A job whose first generation runs on `nodes`; the first of them leads."""
    world = World(terms, first=nodes[0])
    world.run(*nodes)
    return world


def forming(*nodes: Node, terms: Terms = TERMS) -> World:
    """A job in which a worker of the first node has failed: generation 1 forms, and no node has joined it."""
    world = running(*nodes, terms=terms)
    world.fail(FailureKind.SIGNAL, nodes=nodes)
    return world
