"""Drives one agent's pure core on a memory store, as its loop and its session would, at a time that only tests move."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from elaunch.agent.core.actions import Action, Commit, Join, Log, Renew, Widen
from elaunch.agent.core.events import (
    Cleared,
    Committed,
    Event,
    GroupFailed,
    Leased,
    LeaseLost,
    SnapshotChanged,
    Tag,
    Tick,
    WorkerExited,
)
from elaunch.agent.core.running import UNEXPLAINED_S
from elaunch.agent.core.state import Agent, Clearing, Exited, Running, Stopping
from elaunch.agent.core.step import step
from elaunch.agent.core.timeline import Entry, announcements, entries
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.engine import MemoryStore
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot, SnapshotReader
from elaunch.rendezvous.rules.transactions import join
from elaunch.rendezvous.store import KeyEntry, LeaseGone, Op, Put, Txn
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import (
    Failure,
    FailureKind,
    Generation,
    JobSpec,
    Joined,
    Node,
    OpenKind,
    Outcome,
    Program,
    ProgramKind,
)
from tests.unit.agent.job_world import begin_run_lease

KEYS = Keys("job")
SPEC = JobSpec("job", Program(ProgramKind.SCRIPT, "train.py"), max_restarts=3)
TWO = replace(SPEC, nodes_min=2, nodes_max=2)
TIMES = Times()
INT, KILL, TERM = 2, 9, 15
# SIGUSR1 and SIGUSR2.
NOTICES = (10, 12)
STOP_GRACE_S, FAILURE_GRACE_S = TIMES.stop_grace_s, TIMES.failure_grace_s
START_S = 100.0
# Local ranks of a node with three slots.
ALL = frozenset({0, 1, 2})
_ROUNDS_MAX = 200


class Driver:
    """One agent on a memory store of its own, or on one that it shares with others.

    `acted` are the actions of the last event, `all_acted` those of all events; `entries` is its timeline. The store's
    answers wait in `answers` until `settle` or `answer`. A `remote` agent reads as a session with a store on another
    host does: only at the control keys, until the agent leads.
    """

    def __init__(
        self,
        spec: JobSpec = SPEC,
        *,
        store: MemoryStore | None = None,
        host: str = "node-a",
        slots: int = 3,
        times: Times = TIMES,
        remote: bool = False,
        software: str = "",
    ) -> None:
        self.store = store or MemoryStore()
        self.software = software
        self.agent = Agent(Node("", host, f"10.0.0.{slots}", slots), spec, times, Snapshot(KEYS), NOTICES)
        self.now_s = START_S
        self.acted: list[Action] = []
        self.all_acted: list[Action] = []
        self.entries: list[Entry] = []
        self.announcements: list[Entry] = []
        self.answers: deque[Event] = deque()
        self.lease = 0
        self.incarnations = 0
        self._scope = KEYS.control if remote else KEYS.root
        self._reader = SnapshotReader(KEYS)
        self._seen: Mapping[str, KeyEntry] | None = None

    @property
    def snapshot(self) -> Snapshot:
        """Everything in the store, whatever the agent reads."""
        return SnapshotReader(KEYS).read(self.store.read(KEYS.root), whole=True)

    @property
    def snapshot_changed(self) -> SnapshotChanged:
        """The event with what the agent would see now."""
        return SnapshotChanged(self._reader.read(self.store.read(self._scope), whole=self._scope == KEYS.root))

    @property
    def node_id(self) -> str:
        return self.agent.me.node_id

    @property
    def outcome(self) -> Outcome:
        """The outcome of the agent, which must have exited."""
        assert isinstance(self.agent.phase, Exited), self.agent.phase
        return self.agent.phase.outcome

    @property
    def failed(self) -> Failure:
        """The failure of that outcome, which must have one."""
        assert self.outcome.failure
        return self.outcome.failure

    @property
    def generation(self) -> Generation:
        """The newest generation in the store, which must have one."""
        generation = self.snapshot.generation
        assert generation
        return generation

    @property
    def logged(self) -> str:
        """The log lines of the last event."""
        return "\n".join(action.text for action in self.acted if isinstance(action, Log))

    @property
    def commits(self) -> list[Txn]:
        """The transactions of the last event."""
        return [action.txn for action in self.acted if isinstance(action, Commit)]

    def begin(self) -> Driver:
        """Get a lease; the agent has no snapshot yet."""
        self._renew()
        return self

    def happen(self, event: Event) -> list[Action]:
        """One event; what was done, without log lines and transactions."""
        before = self.agent
        self.agent, actions = step(before, event, self.now_s)
        happened = [*entries(before, self.agent, event)]
        self.entries += happened
        self.announcements += announcements(self.agent, happened)
        self.acted = list(actions)
        self.all_acted += actions
        for action in actions:
            self._act(action)
        return [action for action in actions if not isinstance(action, (Log, Commit))]

    def answer(self) -> list[Action]:
        """The store's oldest answer arrives."""
        return self.happen(self.answers.popleft())

    def settle(self) -> list[Action]:
        """Responses and snapshots arrive until nothing changes any more; all that was done."""
        done: list[Action] = []
        for _ in range(_ROUNDS_MAX):
            if self.answers:
                done += self.answer()
            elif self.store.read(self._scope).entries != self._seen:
                self._seen = self.store.read(self._scope).entries
                done += self.happen(self.snapshot_changed)
            else:
                return done
        raise AssertionError(f"it never comes to rest: {self.acted}")

    def after(self, seconds: float) -> list[Action]:
        """That much time passes, and the agent's timer fires."""
        self.now_s += seconds
        return self.happen(Tick())

    def clear(self) -> None:
        """What is left of generation 0 is cleared away, and the store responds."""
        self.happen(cleared(0))
        self.settle()

    def sync(self) -> list[Action]:
        """The agent takes the snapshot that is there now, new or not."""
        return self.happen(self.snapshot_changed)

    def exits(self, local_rank: int, code: int, kind: FailureKind = FailureKind.EXIT_CODE) -> list[Action]:
        """A worker of the current generation ends."""
        phase = self.agent.phase
        assert isinstance(phase, (Running, Stopping, Clearing))
        return self.happen(exited(phase.table.generation, local_rank, code, kind))

    def all_exit(self, code: int = 0, kind: FailureKind = FailureKind.EXIT_CODE) -> None:
        """All workers of the current generation that run end."""
        phase = self.agent.phase
        assert isinstance(phase, (Running, Stopping))
        for rank in sorted(phase.live):
            self.exits(rank, code, kind)

    def loses_peer(self, local_rank: int) -> list[Action]:
        """A worker ends by a lost peer, and in the time in which that may be explained nothing happens."""
        self.exits(local_rank, 1, FailureKind.PEER_LOST)
        self.now_s += UNEXPLAINED_S
        return self.happen(Tick())

    def lose_lease(self) -> list[Action]:
        """The lease expires, and the agent is notified."""
        lost, self.lease = self.lease, 0
        self.store.revoke(lost)
        return self.happen(LeaseLost(lost))

    def write(self, *ops: Op) -> None:
        """Write as another process, without guards."""
        self.store.commit(Txn((), ops))

    def open(
        self, number: int, kind: OpenKind = OpenKind.FAIL, cause: str = "rank 9 failed elsewhere", signum: int = 0
    ) -> None:
        """Open a generation as another node."""
        self.write(Put(KEYS.generation, encode(Generation(number, kind, cause, signum=signum))))

    def sees(
        self, number: int, kind: OpenKind = OpenKind.FAIL, cause: str = "rank 9 failed elsewhere", signum: int = 0
    ) -> list[Action]:
        """Another node opens a generation, and the agent takes the snapshot with it."""
        self.open(number, kind, cause, signum)
        return self.sync()

    def _act(self, action: Action) -> None:
        match action:
            case Commit(txn, tag):
                self._commit(txn, tag)
            case Join(lease, is_member, progressed):
                me = self.agent.me
                joined = Joined(me.node_id, 29500, progressed, self.software)
                self._commit(join(self.agent.snapshot, me, joined, lease, is_member=is_member), Tag.JOIN)
            case Renew():
                if self.lease:
                    self.store.revoke(self.lease)
                self._renew()
            case Widen():
                self._scope = KEYS.root

    def _commit(self, txn: Txn, tag: Tag | None) -> None:
        begin_run_lease(self.store, txn)
        try:
            answer = self.store.commit(txn)
        except LeaseGone:
            if tag:
                self.answers.append(Committed(tag, False, 0))
            if any(isinstance(op, Put) and op.lease == self.lease for op in txn.then):
                self.answers.append(LeaseLost(self.lease))
                self.lease = 0
            return
        if tag is None:
            return
        if not answer.held:
            # The session reads again, so that the agent sees why.
            self._seen = None
        self.answers.append(Committed(tag, answer.held, answer.revision))

    def _renew(self) -> None:
        self.incarnations += 1
        host = self.agent.me.host
        # The lease differs from those of all other drivers on the store, as a random one does.
        self.lease = 1_000_000 * (1 + sum(host.encode())) + self.incarnations
        self.store.grant(self.lease, TIMES.lease_ttl_s)
        self.answers.append(Leased(self.lease, f"{host}-{self.incarnations:08x}"))


def exited(generation: int, local_rank: int, code: int, kind: FailureKind = FailureKind.EXIT_CODE) -> WorkerExited:
    if code == 0:
        return WorkerExited(generation, local_rank, 0, end=ended(generation, local_rank))
    return WorkerExited(generation, local_rank, code, failure(generation, local_rank, code, kind))


def ended(generation: int, rank: int, host: str = "node-a") -> Failure:
    """The record of an exit with 0."""
    record = failure(generation, rank, 0, FailureKind.ENDED_EARLY, host)
    return replace(record, message="ended with exit code 0 at 12:00:00")


def failure(
    generation: int, rank: int, code: int | None, kind: FailureKind = FailureKind.EXIT_CODE, host: str = "node-a"
) -> Failure:
    """A failure whose message differs in each generation, so that it does not count as the same failure twice."""
    logged = "raised RuntimeError: no peer" if kind is FailureKind.PEER_LOST else f"exited with code {code}"
    message = f"{logged} {'x' * generation}"
    node_id = f"{host}-00000001"
    return Failure(kind, generation, node_id, host, rank, rank, 100 + rank, code, message, progressed=True)


def lost(generation: int, *, workers_too: bool) -> GroupFailed:
    kind = FailureKind.TEMPLATE_LOST if workers_too else FailureKind.STORE_LOST
    return GroupFailed(generation, replace(failure(generation, -1, None, kind), message="it ended"), workers_too)


def cleared(generation: int, *, progressed: bool = True) -> Cleared:
    return Cleared(generation, progressed=progressed)


def settle(*drivers: Driver) -> None:
    """Settle all drivers until nothing changes any more."""
    revision = -1
    while revision != drivers[0].store.read(KEYS.root).revision:
        revision = drivers[0].store.read(KEYS.root).revision
        for driver in drivers:
            driver.settle()


def started(spec: JobSpec = SPEC) -> Driver:
    """A single node whose workers run. It has waited for more nodes as long as `spec` has it."""
    driver = Driver(spec).begin()
    driver.settle()
    if driver.agent.lead_at_s is not None:
        driver.now_s = driver.agent.lead_at_s
        driver.happen(Tick())
        driver.settle()
    assert isinstance(driver.agent.phase, Running)
    return driver


def pair(spec: JobSpec = TWO, *, slots: int = 3, times: Times = TIMES) -> tuple[Driver, Driver]:
    """Two nodes that run generation 0; the first leads."""
    first = Driver(spec, host="node-a", slots=slots, times=times).begin()
    second = Driver(spec, host="node-b", store=first.store, slots=slots, times=times, remote=True).begin()
    settle(first, second)
    if first.agent.lead_at_s is not None:
        first.now_s = second.now_s = first.agent.lead_at_s
        first.happen(Tick())
        settle(first, second)
    assert isinstance(first.agent.phase, Running)
    assert isinstance(second.agent.phase, Running)
    return first, second


def ends(driver: Driver, code: int = 0, kind: FailureKind = FailureKind.EXIT_CODE) -> None:
    """All workers exit, and are cleared away."""
    phase = driver.agent.phase
    assert isinstance(phase, (Running, Stopping))
    driver.all_exit(code, kind)
    driver.happen(cleared(phase.table.generation))


def tags(driver: Driver) -> list[Tag | None]:
    """The tags of the transactions whose answers are on their way."""
    return [event.tag for event in driver.answers if isinstance(event, Committed)]
