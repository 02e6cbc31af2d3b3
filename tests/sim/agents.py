"""Hosts, and the agent processes on them: the product's own core and session, and a loop in virtual time."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from signal import Signals
from typing import TYPE_CHECKING

from elaunch.agent.core.actions import (
    Action,
    Blame,
    Clear,
    Commit,
    Join,
    KeepStacks,
    Log,
    NameThreads,
    NotifyWorkers,
    Renew,
    ReplaceForkServer,
    SignalWorkers,
    Spawn,
    TakeStacks,
    Widen,
)
from elaunch.agent.core.events import (
    Cleared,
    Event,
    GroupFailed,
    LinkEvent,
    Sampled,
    Signalled,
    SnapshotPending,
    StacksTaken,
    Tag,
    Tick,
    WorkerEnded,
    WorkerExited,
)
from elaunch.agent.core.state import Agent, Exited, Running
from elaunch.agent.core.step import deadline_s, step
from elaunch.agent.diagnosis.hang import Window
from elaunch.agent.diagnosis.stack_groups import Frame, Stack, ThreadStack
from elaunch.agent.session.session import Request, RetryQueue
from elaunch.agent.session.store_client import StoreClient
from elaunch.agent.session.store_view import JobStore, LocalHost
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot
from elaunch.rendezvous.rules.transactions import join
from elaunch.rendezvous.store import StoreError
from elaunch.rendezvous.types import Failure, FailureKind, JobSpec, Joined, Node, Outcome, RankTable
from tests.sim.groups import KILL, USR1, Worker
from tests.sim.lines import Gone, Line
from tests.sim.plans import HostPlan

if TYPE_CHECKING:
    from tests.sim.cluster import World

KEYS = Keys("job")
FAREWELL_S = 2.0
LOOK_S = 1.0
IDLE = Window(LOOK_S, 0.0, 0.0, 0.0, 0, "S")
WORKS = Window(LOOK_S, 0.9, 0.9, 0.0, 1000, "R")
LINK_LOOK_S = 1.0
# Added to each timer: it must not fire early because of rounding between two clocks.
LATE_S = 1e-6


class Host:
    """One machine: its clock, its network, and the agent that runs on it."""

    def __init__(self, world: World, plan: HostPlan) -> None:
        self.world = world
        self.plan = plan
        self.name = plan.name
        self.is_cut = False
        self.is_storeless = False
        self.is_refused = False
        self.is_off = False
        self.is_sick = False
        self.slow_clears: list[float] = []
        self.processes: list[AgentProcess] = []

    @property
    def is_silent(self) -> bool:
        """Whether no peer notices when a process on this host dies."""
        return self.is_off or self.is_cut

    @property
    def process(self) -> AgentProcess | None:
        """The agent that runs here, if there is one."""
        return self.processes[-1] if self.processes and self.processes[-1].is_alive else None

    def start(self) -> None:
        """Start an agent, unless one runs already."""
        if not self.process and not self.is_off:
            process = AgentProcess(self.world, self, len(self.processes))
            self.processes.append(process)
            process.begin()

    def recover(self) -> None:
        self.is_sick = False

    def now_s(self) -> float:
        return self.plan.clock_s + self.world.now_s * self.plan.rate

    def when(self, local_s: float) -> float:
        """The world's time at which the host's clock shows `local_s`."""
        return (local_s - self.plan.clock_s) / self.plan.rate

    def is_dead(self, process: str) -> bool:
        return any(p.name == process and not p.is_alive for p in self.processes)


def waiting(rank: int) -> Stack:
    """The stack of a rank that waits in an all-reduce."""
    call = Frame("all_reduce", "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 1)
    return Stack(rank, 4711, (ThreadStack("main", (call, Frame("step", "/train.py", 1)), is_main=True),), "S")


class AgentProcess:
    """One agent from its start to its death."""

    def __init__(self, world: World, host: Host, number: int) -> None:
        self.world = world
        self.host = host
        self.name = f"{host.name}#{number}"
        self.rng: random.Random = world.rng
        plan, times = host.plan, world.plan.times
        self.spec: JobSpec = world.spec(wrong=plan.wrong_terms)
        self.line = Line(world, self)
        self._inbox: deque[Event | SnapshotPending] = deque()
        self._received: deque[LinkEvent] = deque()
        self.client = StoreClient(
            JobStore(self.line, KEYS, is_remote=True),
            LocalHost(host.name, self.rng.getrandbits, host.is_dead, host.now_s),
            times,
            self.receive,
        )
        self._requests = RetryQueue(self.client.renew, self.receive, times.backoff_max_s, self.rng.uniform)
        me = Node("", host.name, f"10.0.0.{number}", plan.slots, self.name, plan.role, plan.node_rank, plan.topology)
        self.agent = Agent(me, self.spec, times, Snapshot(KEYS), (USR1,))
        self.started_s = world.now_s
        self.is_alive = True
        self.is_stopped = False
        self.is_wedged = False
        self.is_lost = False
        self.workers: list[Worker] = []
        # The incarnation that ran each generation.
        self.node_of: dict[int, str] = {}
        self.tails: dict[int, str] = {}
        self.outcome: Outcome | None = None
        self.has_given_back = False
        self.succeeded_s = -math.inf
        self._busy: dict[str, tuple[int, int]] = {}
        self.actions = 0
        self.kill_at_action: int | None = None
        self.signals: list[int] = []
        self._missed: list[Callable[[], None]] = []
        self._is_turning = False
        self._is_working = False
        self._is_closing = False
        self._pause_s = 0.0
        self._timer = 0

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_alive]

    def busy(self, what: str) -> int:
        """Count that the agent does `what`. Returns how often it has done so in this second."""
        second, times = self._busy.get(what, (0, 0))
        now = int(self.world.now_s)
        self._busy[what] = (now, times + 1 if now == second else 1)
        return self._busy[what][1]

    def begin(self) -> None:
        self.world.log(self.name, "starts")
        self._order(self.client.begin)

    # Events that come to the agent.

    def receive(self, event: Event | SnapshotPending) -> None:
        self._inbox.append(event)
        self._turn_soon()

    def report(self, event: WorkerExited | GroupFailed | WorkerEnded | Cleared) -> None:
        """Bring the agent an event about its workers: in time or late, and sometimes a second time, much later."""
        world, rng = self.world, self.rng
        if not world.is_rough or rng.random() < 0.8:
            self.receive(event)
        else:
            world.later(rng.uniform(0, 0.5), lambda: self.receive(event))
        if world.is_rough and rng.random() < 0.05:
            world.later(rng.uniform(0, 3), lambda: self.receive(event))

    def read(self, event: LinkEvent) -> None:
        """A worker sends a message on its link. The agent reads it before its next decision, and soon if it waits."""
        self._received.append(event)
        if isinstance(self.agent.phase, Running):
            self.world.later(LINK_LOOK_S, self._turn_soon)
        else:
            self._turn_soon()

    def signal(self, signum: int) -> None:
        self.signals.append(signum)
        self.receive(Signalled(signum, Signals(signum).name))

    def kill(self) -> None:
        """SIGKILL the agent. Its workers die with it."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.world.log(self.name, "is killed")
        self.line.close()
        for worker in self.living:
            self.world.groups[worker.generation].signal(worker, KILL, by_agent=True)
            worker.is_alive = False
        self.world.died(self)

    def stop(self, *, loop_only: bool) -> None:
        if loop_only:
            self.is_wedged = True
        else:
            self.is_stopped = True
        self.line.note()

    def go_on(self) -> None:
        self.is_stopped = self.is_wedged = False
        self.line.note()
        missed, self._missed = self._missed, []
        for what in missed:
            self.world.later(self.rng.uniform(0, 0.01), what)

    def holds(self, what: Callable[[], None], *, is_loop: bool = False) -> bool:
        """Whether `what` cannot be done now. If the agent goes on later, `what` is done then."""
        if not self.is_alive:
            return True
        if self.is_stopped or (is_loop and self.is_wedged):
            self._missed.append(what)
            return True
        return False

    # The agent's loop.

    def _turn_soon(self) -> None:
        if not self._is_turning and self.is_alive:
            self._is_turning = True
            self.world.later(self.rng.uniform(0, self.world.loop_s), self._turn)

    def _turn(self) -> None:
        if self.holds(self._turn, is_loop=True):
            return
        self._is_turning = False
        while self._received and self.is_alive and not isinstance(self.agent.phase, Exited):
            self._happen(self._received.popleft())
        if isinstance(self.agent.phase, Exited):
            return
        if self._inbox:
            event = self._inbox.popleft()
            self._happen(self.client.view.snapshot() if isinstance(event, SnapshotPending) else event)
        if self._inbox or self._received:
            self._turn_soon()
        else:
            self._set_timer()

    def _set_timer(self) -> None:
        self._timer += 1
        timer = self._timer
        timers_s = (deadline_s(self.agent), self.client.due_s)
        due_s = min((at_s for at_s in timers_s if at_s is not None), default=None)
        if due_s is not None and self.is_alive and not isinstance(self.agent.phase, Exited):
            in_s = max(0.0, self.host.when(due_s) - self.world.now_s) + LATE_S
            self.world.later(in_s, lambda: self._ring(timer))

    def _ring(self, timer: int) -> None:
        if timer != self._timer or self.holds(lambda: self._ring(timer), is_loop=True):
            return
        now_s = self.host.now_s()
        if self.client.tick(now_s):
            self._requests.add_renewal()
            self._work_soon()
        due_s = deadline_s(self.agent)
        if due_s is not None and now_s >= due_s:
            self._inbox.append(Tick())
        if self._inbox:
            self._turn_soon()
        else:
            self._set_timer()

    def _happen(self, event: Event) -> None:
        world = self.world
        world.log(self.name, event)
        before = self.agent
        self.agent, actions = step(before, event, self.host.now_s())
        for action in actions:
            self.actions += 1
            if self.kill_at_action is not None and self.actions >= self.kill_at_action:
                self.kill()
                return
            if not isinstance(action, Log) or world.is_verbose:
                world.log(self.name, action)
            self._act(action)
        if isinstance(self.agent.phase, Exited) and not isinstance(before.phase, Exited):
            world.log(self.name, self.agent.phase)
            self._exit(self.agent.phase.outcome)
        world.checks.stepped(self, before, event)

    def _act(self, action: Action) -> None:
        match action:
            case Commit(txn, tag):
                self._order(lambda: self.client.commit(txn, tag))
            case Join(lease, is_member, progressed):
                me, snapshot = self.agent.me, self.agent.snapshot
                joined = Joined(me.node_id, self.rng.randint(1024, 65535), progressed)
                txn = join(snapshot, me, joined, lease, is_member=is_member)
                self._order(lambda: self.client.commit(txn, Tag.JOIN))
            case Renew():
                self._order(self.client.new_lease)
            case Widen():
                self._order(self.client.view.widen)
            case Spawn(table, group_rank):
                self._spawn(table, group_rank)
            case SignalWorkers(generation, local_ranks, signum):
                for worker in self._living_of(generation, local_ranks):
                    self.world.checks.signalling(worker, signum)
                    self.world.groups[generation].signal(worker, signum, by_agent=True)
            case NotifyWorkers(generation, local_ranks, message):
                for worker in self._living_of(generation, local_ranks):
                    self.world.groups[generation].notify(worker, message)
            case Clear(generation):
                self._clear(generation)
            case ReplaceForkServer(generation):
                self.lose_service(generation, FailureKind.TEMPLATE_LOST)
            case TakeStacks(generation, local_ranks):
                stacks = tuple(waiting(w.rank) for w in self._living_of(generation, local_ranks))
                self.world.later(self.rng.uniform(0, 0.1), lambda: self.receive(StacksTaken(generation, stacks)))
            case Blame(generation):
                self.world.groups[generation].blame(self)
            case Log() | KeepStacks() | NameThreads():
                pass

    # The agent's actions.

    def _living_of(self, generation: int, local_ranks: frozenset[int]) -> list[Worker]:
        return [w for w in self.living if w.generation == generation and w.local_rank in local_ranks]

    def _spawn(self, table: RankTable, group_rank: int) -> None:
        self.world.checks.spawning(self, table, group_rank)
        self.node_of[table.generation] = self.agent.me.node_id
        self.tails, self.workers = {}, []
        self.world.group_of(table).add(self, group_rank)
        if self.world.plan.watches:
            self.world.later(LOOK_S, lambda: self._look_at_workers(table.generation))

    def _look_at_workers(self, generation: int) -> None:
        """The agent's sampler polls this node's workers, as long as it is there."""
        mine = [worker for worker in self.living if worker.generation == generation]
        if not self.is_alive or not mine:
            return
        self.world.later(LOOK_S, lambda: self._look_at_workers(generation))
        if not (self.is_stopped or self.is_wedged):
            group = self.world.groups[generation]
            self.receive(Sampled(generation, {w.local_rank: WORKS if group.works(w) else IDLE for w in mine}))

    def lose_service(self, generation: int, kind: FailureKind, *, is_own: bool = False) -> None:
        """The worker store, or the fork server with all workers, is gone."""
        group, workers_too = self.world.groups[generation], kind is FailureKind.TEMPLATE_LOST
        mine = [worker for worker in self.living if worker.generation == generation]
        if is_own and mine:
            self.world.note_failure(mine[0])
        node_id = self.node_of[generation]
        failure = Failure(kind, generation, node_id, self.host.name, -1, -1, -1, None, "it is gone")
        self.report(GroupFailed(generation, failure, workers_too))
        if workers_too:
            for worker in mine:
                worker.is_alive = False
                group.review()
                # No process is left that could report the worker's end. Its peers notice all the same.
                group.reset_peers(worker)

    def _clear(self, generation: int) -> None:
        self.world.checks.clearing(self, generation)
        for worker in self.living:
            self.world.groups[worker.generation].signal(worker, KILL, by_agent=True)
        slow = self.host.slow_clears
        in_s = slow.pop() if slow else self.rng.uniform(0, 0.1)
        group = self.world.groups[generation]
        progressed = group.progressed
        self.world.later(in_s, lambda: self.report(Cleared(generation, dict(self.tails), progressed)))

    def _exit(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if outcome.exit_code == 0:
            self.succeeded_s = self.world.now_s
        self.world.checks.exiting(self, outcome)
        self._is_closing = True
        self._requests.end()
        self.world.later(FAREWELL_S, self._die)
        self._work_soon()

    def _die(self) -> None:
        if self.holds(self._die):
            return
        self.is_alive = False
        self.line.close()
        self.world.died(self)

    # The thread of the agent's session.

    def _order(self, request: Request) -> None:
        self._requests.add(request)
        self._work_soon()

    def _work_soon(self) -> None:
        if not self._is_working and self.is_alive:
            self._is_working = True
            self.world.later(self.rng.uniform(0, self.world.call_s), self._work)

    def _work(self) -> None:
        if self.holds(self._work):
            return
        if self._requests.has_any and not self.line.is_up:
            # The caller notices only when the call's deadline is over.
            self.world.later(self.world.plan.times.call_deadline_s, self._attempt)
        else:
            self._attempt()

    def _attempt(self) -> None:
        if self.holds(self._attempt):
            return
        try:
            if self._is_closing and self._requests.is_over:
                self._say_farewell()
                return
            self._pause_s = self._requests.do_next(self._pause_s)
        except Gone:
            return
        self._is_working = False
        if self._requests.has_any or self._is_closing:
            self._is_working = True
            waited_s, self.line.waited_s = self.line.waited_s, 0.0
            pause_s = 0.0 if self._is_closing else self._pause_s
            self.world.later(pause_s + waited_s + self.rng.uniform(0, self.world.call_s), self._work)

    def _say_farewell(self) -> None:
        if not self._requests.is_away:
            with suppress(StoreError):
                self.client.revoke()
                self.has_given_back = True
        self._die()
