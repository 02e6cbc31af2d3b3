"""One agent in a random world and virtual time: the pure core on a memory store, everything around it simulated.

Each seed is one job's life. Safety is asserted after every action. Liveness is asserted at the end: once there are no
more faults, the agent must exit, with the exit code that follows from the history. A seed that fails prints itself and
its history. Run it alone with `pytest tests/sim -k '[<seed>]'`.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from signal import SIGUSR1

import pytest

from elaunch.agent.core.actions import (
    Action,
    Clear,
    Commit,
    Exit,
    Join,
    Renew,
    ReplaceForkServer,
    Say,
    SignalWorkers,
    Spawn,
)
from elaunch.agent.core.events import (
    Cleared,
    Committed,
    Event,
    Leased,
    Looked,
    ServiceLost,
    Signalled,
    Tag,
    Tick,
    WorkerExited,
)
from elaunch.agent.core.state import Agent, Clearing, Exited, Running, Stopping, WorkersDone
from elaunch.agent.core.step import deadline_s, step
from elaunch.agent.core.stopping import KILL_WAIT_S
from elaunch.rendezvous.engine.memory_store import MemoryStore
from elaunch.rendezvous.job_spec import JobSpec, Program, ProgramKind
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot, SnapshotReader
from elaunch.rendezvous.rules.transactions import join
from elaunch.rendezvous.store import Put, Txn
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Failure, FailureKind, Joined, Node, OutcomeKind, RankTable
from tests.harness import seeds
from tests.unit.agent.job_world import begin_run_lease

KEYS = Keys("job")
INT, KILL, TERM = 2, 9, 15
FAST_SEEDS, SLOW_SEEDS = range(300), range(300, 10_300)
STEPS_MAX = 5000
STOP_GRACE_S = 5.0
TIMES = Times(stop_grace_s=STOP_GRACE_S)
LEASE = 17
# The largest delay of an event on its way to the agent.
LATE_S = 1.0


class Obedience(Enum):
    """What a worker does with a TERM or INT."""

    DIES = "dies of it"
    EXITS_0 = "exits with 0"
    EXITS_1 = "exits with 1"
    IGNORES = "ignores it"


@dataclass
class Worker:
    """One simulated process. `stuck` ones are not even reported after SIGKILL (their fork server hangs)."""

    generation: int
    local_rank: int
    obedience: Obedience
    stuck: bool
    alive: bool = True
    code: int | None = None


class World:
    """Everything around the agent: workers, fork server, clean-up, clock, the store's watch, and a person with signals.

    The number of random faults is `faults`. After them every worker that is started exits with 0.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        rng = self.rng
        slots = rng.choice([1, 1, 2, 3, 8])
        window_s = rng.choice([None, None, 20.0])
        program = Program(ProgramKind.SCRIPT, "train.py")
        self.spec = JobSpec("job", program, max_restarts=rng.choice([0, 1, 2, 3, 12]), restart_window_s=window_s)
        self.me = Node("node-a-00000001", "node-a", "127.0.0.1", slots)
        self.agent = Agent(replace(self.me, node_id=""), self.spec, TIMES, Snapshot(KEYS), (SIGUSR1,))
        self.store = MemoryStore()
        self.reader = SnapshotReader(KEYS)
        self.now_s = 0.0
        self.due: list[tuple[float, int, str, object]] = []
        self.order = 0
        self.faults = rng.choice([0, 1, 2, 3, 5, 20])
        self.people = rng.random() < 0.3
        # A store in another process reports changes late. The agent's looks still come in order.
        self.watch_delay_s = rng.choice([0.0, 0.0, 0.01, 3.0])
        self.looked_at_s = 0.0
        self.answered_at_s = 0.0
        self.workers: list[Worker] = []
        self.groups: list[int] = []
        self.tables: dict[int, RankTable] = {}
        self.ended: str | None = None
        self.real_failures: set[int] = set()
        self.stopped_at_s: dict[int, float] = {}
        self.signals: list[int] = []
        self.interrupted = False
        self.told: list[Event] = []
        self.cleared: set[int] = set()
        self.checked = 0
        self.exits = 0
        self.history: list[str] = []
        self.store.grant(LEASE, TIMES.lease_ttl_s)
        self.store.watch(KEYS.root, 0, lambda update: self.watched())

    # The main loop of the simulation.

    def live(self) -> bool:
        self.answer(Leased(LEASE, self.me.node_id))
        self.watched()
        self.signal_later(self.people)
        steps = 0
        while not isinstance(self.agent.phase, Exited):
            steps += 1
            assert steps < STEPS_MAX, "the agent goes on for ever"
            tick_s = deadline_s(self.agent)
            if tick_s is not None and (not self.due or tick_s <= self.due[0][0]):
                self.now_s = max(self.now_s, tick_s)
                self.happen(Tick())
                continue
            assert self.due, f"nothing will ever happen any more, in {self.agent.phase}"
            at_s, _, what, value = heapq.heappop(self.due)
            self.now_s = max(self.now_s, at_s)
            getattr(self, f"on_{what}")(value)
        return True

    def later(self, delay_s: float, what: str, value: object) -> None:
        self.order += 1
        heapq.heappush(self.due, (self.now_s + delay_s, self.order, what, value))

    def watched(self) -> None:
        snapshot = self.reader.read(self.store.read(KEYS.root), whole=True)
        delay_s = self.rng.uniform(0, self.watch_delay_s)
        self.looked_at_s = max(self.looked_at_s, self.now_s + delay_s)
        self.later(self.looked_at_s - self.now_s, "event", Looked(snapshot))

    def answer(self, event: Event) -> None:
        """The store's answers also come in order, but with delays other than those of the looks."""
        delay_s = self.rng.uniform(0, self.watch_delay_s)
        self.answered_at_s = max(self.answered_at_s, self.now_s + delay_s)
        self.later(self.answered_at_s - self.now_s, "event", event)

    def commit(self, txn: Txn, tag: Tag | None) -> None:
        begin_run_lease(self.store, txn)
        answer = self.store.commit(txn)
        if tag is None:
            return
        if not answer.held:
            self.watched()
        self.answer(Committed(tag, answer.held, answer.revision))

    def signal_later(self, wanted: bool) -> None:
        if wanted:
            self.later(self.rng.expovariate(1 / 10), "signal", self.rng.choice([INT, TERM]))

    def fault(self) -> bool:
        """Whether something goes wrong now."""
        if self.faults and self.rng.random() < 0.5:
            self.faults -= 1
            return True
        return False

    def tell(self, event: Event) -> None:
        """Bring an event to the agent: in time or late, once or twice, and sometimes again much later."""
        rng = self.rng
        self.later(rng.choice([0.0, 0.0, rng.uniform(0, LATE_S)]), "event", event)
        if rng.random() < 0.1:
            self.later(rng.uniform(0, LATE_S), "event", event)
        if self.told and rng.random() < 0.1:
            self.later(rng.uniform(0, LATE_S), "old_event", rng.choice(self.told))

    def on_event(self, event: object) -> None:
        self.happen(event)  # type: ignore[arg-type]

    def on_old_event(self, event: object) -> None:
        """An event of an old generation changes nothing."""
        before, revision = self.agent, self.store.read(KEYS.root).revision
        old = isinstance(event, (WorkerExited, ServiceLost, Cleared)) and event.generation < self.generation
        actions = self.happen(event)  # type: ignore[arg-type]
        if old:
            assert (actions, self.agent) == ((), before), f"an old event changed something: {event}"
            assert self.store.read(KEYS.root).revision == revision

    def on_signal(self, signum: object) -> None:
        assert isinstance(signum, int)
        self.signals.append(signum)
        # A signal comes too late only if all workers have already ended with exit code 0.
        phase = self.agent.phase
        is_done = isinstance(phase, Clearing) and isinstance(phase.ended, WorkersDone)
        self.interrupted |= not (isinstance(phase, Exited) or is_done)
        # The scheduler may signal the workers too, before or after the agent.
        if self.rng.random() < 0.3:
            for worker in self.living:
                self.obey(worker, signum)
        self.happen(Signalled(signum, "SIGINT" if signum == INT else "SIGTERM"))
        self.signal_later(self.rng.random() < 0.5)

    def on_worker(self, value: object) -> None:
        """A worker ends by itself, or by a fault."""
        worker, code = value  # type: ignore[misc]
        if worker.alive:
            self.end(worker, code)

    def on_service(self, value: object) -> None:
        """The worker store or the fork server of a generation is gone, if its workers still run."""
        generation, workers_too = value  # type: ignore[misc]
        mine = [worker for worker in self.living if worker.generation == generation]
        if not mine:
            return
        self.lose(generation, workers_too)

    def on_cleanup(self, generation: object) -> None:
        assert isinstance(generation, int)
        for worker in self.living:
            worker.alive = False
        tails = {0: "words\n"} if self.rng.random() < 0.5 else {}
        progressed = self.rng.random() < 0.8
        self.tell(Cleared(generation, tails, reached_store=progressed, progressed=progressed))

    @property
    def generation(self) -> int:
        """The newest generation whose workers were started here."""
        return self.groups[-1] if self.groups else -1

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.alive]

    def end(self, worker: Worker, code: int) -> None:
        worker.alive, worker.code = False, code
        failure = None
        if code:
            # A worker that ends after the agent asked for it is no failure, so no restart may be charged for it.
            if worker.generation not in self.stopped_at_s:
                self.real_failures.add(worker.generation)
            kind = self.rng.choice([FailureKind.EXIT_CODE, FailureKind.PEER_LOST]) if code > 0 else FailureKind.SIGNAL
            message = f"exited with code {code}" if kind is FailureKind.EXIT_CODE else f"raised or died {code}"
            failure = replace(self.blameless(worker.generation, kind, message), local_rank=worker.local_rank, rank=0)
            failure = replace(failure, code=code, progressed=self.rng.random() < 0.8)
        self.tell(WorkerExited(worker.generation, worker.local_rank, code, failure))

    def lose(self, generation: int, workers_too: bool) -> None:
        kind = FailureKind.TEMPLATE_LOST if workers_too else FailureKind.STORE_LOST
        if generation not in self.stopped_at_s:
            self.real_failures.add(generation)
        if workers_too:
            for worker in self.living:
                worker.alive = False
        self.tell(ServiceLost(generation, self.blameless(generation, kind, "it is gone"), workers_too))

    def blameless(self, generation: int, kind: FailureKind, message: str) -> Failure:
        return Failure(kind, generation, self.me.node_id, self.me.host, -1, -1, -1, None, message)

    def obey(self, worker: Worker, signum: int) -> None:
        if signum == KILL:
            if not worker.stuck:
                self.end(worker, -KILL)
            return
        codes = {Obedience.DIES: -signum, Obedience.EXITS_0: 0, Obedience.EXITS_1: 1}
        if worker.obedience in codes:
            self.later(self.rng.uniform(0, 3), "worker", (worker, codes[worker.obedience]))

    # The agent's steps and actions.

    def happen(self, event: Event) -> tuple[Action, ...]:
        self.history.append(f"{self.now_s:8.3f} {self.short(event)}")
        self.agent, actions = step(self.agent, event, self.now_s)
        if isinstance(event, (WorkerExited, ServiceLost, Cleared)):
            self.told.append(event)
        for action in actions:
            self.history.append(f"             -> {self.short(action)}")
            self.act(action)
            self.check()
        return actions

    def act(self, action: Action) -> None:
        match action:
            case Commit(txn, tag):
                self.commit(txn, tag)
            case Join(lease, is_member, progressed):
                joined = Joined(self.me.node_id, 29500, progressed)
                self.commit(join(self.agent.snapshot, self.me, joined, lease, is_member=is_member), Tag.JOIN)
            case Renew():
                raise AssertionError("the lease was not lost")
            case Spawn(table, group_rank):
                self.spawn(table, group_rank)
            case SignalWorkers(generation, local_ranks, signum):
                self.stopped_at_s.setdefault(generation, self.now_s)
                for worker in self.living:
                    if worker.generation == generation and worker.local_rank in local_ranks:
                        self.obey(worker, signum)
            case Clear(generation):
                assert generation not in self.cleared, f"generation {generation} is cleared twice"
                self.cleared.add(generation)
                took_s = self.now_s - self.stopped_at_s.get(generation, self.now_s)
                assert took_s <= STOP_GRACE_S + KILL_WAIT_S + LATE_S, f"stopping took {took_s:.1f} s"
                self.later(self.rng.uniform(0, 0.5), "cleanup", generation)
            case ReplaceForkServer(generation):
                self.lose(generation, workers_too=True)
            case Exit():
                self.exits += 1
                self.store.revoke(LEASE)
            case Say():
                pass

    def spawn(self, table: RankTable, group_rank: int) -> None:
        rng, generation = self.rng, table.generation
        assert not self.living, f"two groups alive: {self.living} and generation {generation}"
        assert not self.groups or self.groups[-1] in self.cleared, "a group is started before the last was cleared away"
        assert generation > self.generation, f"generation {generation} is run twice"
        self.groups.append(generation)
        for local_rank in range(table.seats[group_rank].slots):
            obedience = rng.choice(list(Obedience))
            worker = Worker(generation, local_rank, obedience, stuck=rng.random() < 0.15)
            self.workers.append(worker)
            code = rng.choice([1, 3, -KILL, -TERM, -11]) if self.fault() else 0
            self.later(rng.uniform(0, 10), "worker", (worker, code))
        if self.fault():
            self.later(rng.uniform(0, 10), "service", (generation, rng.random() < 0.5))

    # The checks after every action, and at the end.

    def check(self) -> None:
        if self.checked != self.store.engine.revision:
            self.checked = self.store.engine.revision
            self.check_store()
        if isinstance(self.agent.phase, (Running, Stopping)):
            live = {worker.local_rank for worker in self.living if worker.generation == self.generation}
            assert live <= self.agent.phase.live, "the agent forgot a worker that runs"
        if isinstance(self.agent.phase, Clearing):
            assert not self.living, "workers run while the agent clears up after them"

    def check_store(self) -> None:
        view = self.store.read(KEYS.root)
        entries, snapshot = view.entries, self.reader.read(view, whole=True)
        for generation, table in snapshot.tables.items():
            assert self.tables.setdefault(generation, table) == table, f"two tables in generation {generation}"
            assert table.generation == generation
            ranks = [seat.first_rank + n for seat in table.seats for n in range(seat.slots)]
            assert ranks == list(range(self.me.slots)), f"ranks {ranks}"
            assert table.restarts <= len([g for g in self.real_failures if g < generation])
            assert table.restarts <= self.spec.max_restarts or self.spec.restart_window_s is not None
        if KEYS.ended in entries:
            assert self.ended in (None, entries[KEYS.ended].value), "`ended` was written twice"
            assert entries[KEYS.ended].create_revision == entries[KEYS.ended].mod_revision
            self.ended = entries[KEYS.ended].value
        else:
            assert self.ended is None, "`ended` was taken back"

    def check_end(self) -> None:
        assert isinstance(self.agent.phase, Exited)
        outcome = self.agent.phase.outcome
        assert self.exits == 1
        assert not self.living, "workers outlive the agent"
        assert outcome.restarts == max(0, len(self.groups) - 1)
        assert not self.store.read(KEYS.members).entries, "the node's keys outlive it"
        snapshot = self.reader.read(self.store.read(KEYS.root), whole=True)
        match outcome.kind:
            case OutcomeKind.INTERRUPTED:
                assert outcome.exit_code - 128 in self.signals, "exit code of a signal that never came"
                knew_of_job = self.agent.membership.belongs and self.agent.snapshot.generation is not None
                assert snapshot.ended or outcome.signum == TERM or not knew_of_job, "SIGINT did not end the job"
            case OutcomeKind.FAILED:
                assert outcome.exit_code == 1
                assert not self.interrupted, "a signal was ignored"
                assert snapshot.ended == outcome
                assert outcome.failure
                assert outcome.failure.generation == self.generation in self.real_failures
                assert self.generation in self.cleared
            case OutcomeKind.SUCCEEDED:
                assert outcome.exit_code == 0
                assert snapshot.ended == outcome
                assert all(worker.generation in self.cleared for worker in self.workers)
                codes = [worker.code for worker in self.workers if worker.generation == self.generation]
                assert codes == [0] * self.me.slots, f"success with exit codes {codes}"
                assert not self.interrupted, "a signal was ignored"
        if self.spec.max_restarts == 0:
            assert len(self.groups) <= 1
        if self.spec.restart_window_s is None:
            assert len(self.groups) <= 1 + self.spec.max_restarts

    def short(self, what: object) -> str:
        match what:
            case Looked(snapshot):
                table, generation = snapshot.table, snapshot.generation
                numbers = (generation and generation.number, table and table.generation, bool(snapshot.ended))
                return "Looked: generation {}, table {}, ended {}".format(*numbers)
            case WorkerExited(generation, local_rank, code):
                return f"WorkerExited generation {generation} local rank {local_rank} code {code}"
            case ServiceLost(generation, failure):
                return f"ServiceLost generation {generation} {failure.kind.value}"
            case Commit(txn):
                return f"Commit {[op.key.removeprefix(KEYS.root) for op in txn.then if isinstance(op, Put)]}"
            case Spawn(table):
                return f"Spawn generation {table.generation}"
            case _:
                return str(what)


def simulate(seed: int) -> World:
    world = World(seed)
    try:
        world.live()
        world.check_end()
    except Exception as error:
        history = "\n".join(world.history[-200:])
        raise AssertionError(f"seed {seed}: {error}\n{world.spec}\n{history}") from error
    return world


@cache
def life(seed: int) -> World:
    return simulate(seed)


@pytest.mark.parametrize("seed", seeds(FAST_SEEDS))
def test_one_node_survives_a_random_life(seed: int) -> None:
    life(seed)


def test_the_same_seed_is_the_same_life() -> None:
    assert simulate(7).history == simulate(7).history


@pytest.mark.thorough
def test_the_random_lives_hold_what_they_promise() -> None:
    """Every kind of fault happens in some seed, and every kind of end is reached."""
    worlds = [life(seed) for seed in FAST_SEEDS]

    said = "\n".join(line for world in worlds for line in world.history)
    outcomes = {world.agent.phase.outcome.kind for world in worlds if isinstance(world.agent.phase, Exited)}
    assert outcomes == {OutcomeKind.SUCCEEDED, OutcomeKind.FAILED, OutcomeKind.INTERRUPTED}
    assert max(len(world.groups) for world in worlds) > 5
    for words in ("worker store lost", "fork server lost", "SIGKILL", "ReplaceForkServer", "SIGINT again", "code -15"):
        assert words in said, words


@pytest.mark.slow
def test_one_node_survives_ten_thousand_random_lives() -> None:
    for seed in SLOW_SEEDS:
        simulate(seed)
