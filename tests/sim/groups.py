"""The workers of a whole cluster: their common progress, the effect of one worker's end, and how they obey signals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from elaunch.agent.core.actions import Message, PeerFailed, StopAtStepBoundary
from elaunch.agent.core.events import GroupFailed, WorkerEnded, WorkerExited, WorkerListens, WorkerSaved, WorkerStopped
from elaunch.agent.core.running import STOPPED_HOLD_S
from elaunch.agent.core.state import Running
from elaunch.rendezvous.types import Failure, FailureKind, RankTable
from tests.sim.plans import Program

if TYPE_CHECKING:
    from tests.sim.agents import AgentProcess
    from tests.sim.cluster import World

INT, BUS, KILL, USR1, TERM = 2, 7, 9, 10, 15
# A worker notices a reset connection after this time.
PEER_LOST_S = (0.02, 0.2)
PROGRESS_S = 0.5
# A worker on a sick host fails so long after the group began to train; sometimes before there was progress.
SICK_S = (0.4, 1.5)
PEER_TAIL = "RuntimeError: Connection closed by peer [10.0.0.1]:4711\n"
OWN_TAIL = "step 299\n"


class Manner(Enum):
    """What a worker does with a TERM or INT."""

    DIES = "dies of it"
    EXITS_0 = "exits with 0"
    EXITS_1 = "exits with 1"
    SLOW = "saves first, and exits with 0"
    IGNORES = "ignores it"
    STUCK = "not even SIGKILL ends it for a while"


@dataclass(eq=False)
class Worker:
    """One process. It was notified at `notified_s` to stop after a step, and at `failed_s` of a failure."""

    process: AgentProcess
    generation: int
    local_rank: int
    rank: int
    manner: Manner
    is_alive: bool = True
    code: int | None = None
    was_signalled: bool = False
    notified_s: float | None = None
    failed_s: float | None = None
    has_saved: bool = False
    has_raised: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} of generation {self.generation} on {self.process.name}"


class Group:
    """All workers of one generation."""

    def __init__(self, world: World, table: RankTable) -> None:
        self._world = world
        self.table = table
        self.workers: dict[int, Worker] = {}
        self.runs_since_s: float | None = None
        self.ran_s = 0.0
        self.is_finished = False
        self.is_to_stop = False
        self.is_hung = False
        self._token = 0

    def add(self, process: AgentProcess, group_rank: int) -> None:
        """Start a node's workers."""
        world, seat, rng = self._world, self.table.seats[group_rank], self._world.rng
        manners = [Manner.DIES] if world.plan.obedient or not world.is_rough else [*Manner]
        for local_rank in range(seat.slots):
            rank = seat.first_rank + local_rank
            worker = Worker(process, self.table.generation, local_rank, rank, rng.choice(manners))
            self.workers[rank] = worker
            process.workers.append(worker)
            is_bad_host = process.host is world.hosts[-1]
            program = world.plan.program
            if program is Program.UNSTARTABLE or (program is Program.UNSTARTABLE_HERE and is_bad_host):
                world.later(rng.uniform(0.1, 0.4), lambda worker=worker: self._fail_to_start(worker))
            elif not world.plan.collective:
                lasts_s = rng.uniform(0.3, 1.0) * world.plan.work_s
                world.later(lasts_s, lambda worker=worker: self.end(worker, 0))
            if world.plan.listens:
                world.later(rng.uniform(0, 0.3), lambda worker=worker: self._listen(worker))
        self.review()

    def review(self) -> None:
        """Start or stop the group's progress: it trains only if all ranks are here and reach each other."""
        world = self._world
        hosts = {worker.process.host.name: worker.process.host for worker in self.workers.values()}
        is_whole = len(self.workers) == self.table.world_size and all(w.is_alive for w in self.workers.values())
        is_linked = len(hosts) == 1 or not any(host.is_cut for host in hosts.values())
        runs = is_whole and is_linked and not self.is_hung
        if runs and self.runs_since_s is None:
            self.runs_since_s = world.now_s
            self._token += 1
            token = self._token
            if world.plan.collective:
                world.later(max(0.0, world.plan.work_s - world.trained_s), lambda: self._finish(token))
            if world.plan.program is Program.ERRONEOUS:
                world.later(0.2, lambda: self._err(token))
            for worker in self.workers.values():
                self.sicken(worker)
            if self.is_to_stop:
                world.later(world.rng.uniform(0, 0.3), lambda: self._come_to_boundary(token))
        elif not runs and self.runs_since_s is not None:
            ran_s = world.now_s - self.runs_since_s
            self.ran_s += ran_s
            self.runs_since_s = None
            self._token += 1
            if world.plan.collective and not self.is_finished:
                # A checkpoint keeps most of the progress.
                world.trained_s += 0.9 * ran_s

    @property
    def progressed(self) -> bool:
        since_s = self._world.now_s - self.runs_since_s if self.runs_since_s is not None else 0.0
        return self.ran_s + since_s > PROGRESS_S

    def end(
        self,
        worker: Worker,
        code: int,
        kind: FailureKind | None = None,
        *,
        is_own: bool = False,
        has_stopped: bool = False,
    ) -> None:
        """A worker ends. `is_own`: a failure is the worker's own, whatever follows from it.

        A worker that `has_stopped` after a step leaves no rank waiting, since all ranks stopped after that step.
        """
        if not worker.is_alive:
            return
        worker.is_alive, worker.code = False, code
        failure = self._failure(worker, code, kind) if code else None
        end = None if code else self._failure(worker, 0, FailureKind.ENDED_EARLY)
        if code and is_own:
            self._world.note_failure(worker)
            worker.process.tails[worker.local_rank] = OWN_TAIL
        self.review()
        worker.process.report(WorkerExited(worker.generation, worker.local_rank, code, failure, end))
        if not self.is_finished and self._world.plan.collective and not has_stopped:
            self.reset_peers(worker)

    def signal(self, worker: Worker, signum: int, *, by_agent: bool) -> None:
        """A worker gets a signal."""
        world, rng = self._world, self._world.rng
        if not worker.is_alive:
            return
        if signum == KILL:
            if worker.manner is Manner.STUCK:
                # The process runs no more code, but its end is not reported yet.
                world.later(rng.uniform(1, 40), lambda: self._report_late(worker))
                worker.is_alive, worker.code = False, -KILL
                self.review()
                return
            self.end(worker, -KILL)
            return
        within_s = {Manner.DIES: 0.01, Manner.EXITS_0: 0.3, Manner.EXITS_1: 0.3, Manner.SLOW: 2.5}.get(worker.manner)
        if within_s is None:
            return
        codes = {Manner.DIES: -signum, Manner.EXITS_1: 1}
        code = codes.get(worker.manner, 0)
        is_own = not by_agent
        # The agent gets the scheduler's signal before a worker has saved and ended.
        at_least_s = 0.4 if is_own and not code else 0.0
        world.later(at_least_s + rng.uniform(0, within_s), lambda: self.end(worker, code, is_own=is_own))

    def notify(self, worker: Worker, message: Message) -> None:
        """A worker's agent sends a message on the link."""
        world = self._world
        if not worker.is_alive:
            return
        match message:
            case StopAtStepBoundary():
                worker.notified_s = world.now_s if worker.notified_s is None else worker.notified_s
                if not world.plan.collective:
                    world.later(world.rng.uniform(0, 0.3), lambda: self._stop(worker))
                elif not self.is_to_stop:
                    self.is_to_stop, token = True, self._token
                    world.later(world.rng.uniform(0, 0.3), lambda: self._come_to_boundary(token))
            case PeerFailed():
                worker.failed_s = world.now_s
                if worker.manner not in (Manner.STUCK, Manner.IGNORES):
                    world.later(world.rng.uniform(0, 0.3), lambda: self._save(worker))

    def hang(self) -> None:
        """The ranks wait for each other for ever. Agents that watch for a hang find out."""
        if self.is_finished or not self._world.plan.collective:
            return
        self.is_hung = True
        self.review()
        if self._world.plan.watches:
            return
        for worker in list(self.workers.values()):
            if worker.is_alive and worker.local_rank == 0:
                self._world.later(self._world.rng.uniform(3, 4), lambda w=worker: self._be_found_hung(w))

    def works(self, worker: Worker) -> bool:
        """Whether it uses its CPU. The others wait for rank 0: it evaluates, all the time."""
        return not self.is_hung and (worker.rank == 0 or self.is_finished or not self._world.plan.collective)

    def blame(self, process: AgentProcess) -> None:
        """The verdict is that the job hangs, and that this node has the failure."""
        for worker in self.workers.values():
            if worker.process is process and worker.is_alive:
                self._be_found_hung(worker)
                return

    def _be_found_hung(self, worker: Worker) -> None:
        if worker.is_alive and worker.process.is_alive:
            self._world.note_failure(worker)
            failure = replace(self._failure(worker, 0, FailureKind.HANG), code=None, message="hung")
            worker.process.report(GroupFailed(worker.generation, failure))

    def _listen(self, worker: Worker) -> None:
        if worker.is_alive:
            worker.process.read(WorkerListens(worker.generation, worker.local_rank, to_stop=True, to_failure=True))

    def _save(self, worker: Worker) -> None:
        if worker.is_alive and not self.is_finished:
            worker.has_saved = True
            worker.process.read(WorkerSaved(worker.generation, worker.local_rank, 1))

    def _come_to_boundary(self, token: int) -> None:
        """All ranks that can still do a step together stop after the same step."""
        if token == self._token and self.runs_since_s is not None and not self.is_finished:
            for worker in self.workers.values():
                self._stop(worker)

    def _stop(self, worker: Worker) -> None:
        world = self._world
        if not worker.is_alive:
            return
        worker.process.read(WorkerStopped(worker.generation, worker.local_rank, 1))
        code = world.rng.choice([128 + TERM, 128 + TERM, 0])
        world.later(world.rng.uniform(0, 0.5), lambda: self._exit_stopped(worker, code))

    def _exit_stopped(self, worker: Worker, code: int) -> None:
        if not worker.is_alive:
            return
        self.end(worker, code, has_stopped=True)
        # The agent may learn the reason of the stop too late, or never. The exit then counts as a failure.
        hold_s = 0.9 * STOPPED_HOLD_S
        if code:
            self._world.later(hold_s, lambda: self._count_if_unheard(worker))

    def _count_if_unheard(self, worker: Worker) -> None:
        phase = worker.process.agent.phase
        if isinstance(phase, Running) and phase.table.generation == worker.generation:
            self._world.note_failure(worker)

    def _report_late(self, worker: Worker) -> None:
        failure = self._failure(worker, -KILL, None)
        worker.process.report(WorkerExited(worker.generation, worker.local_rank, -KILL, failure))
        self.reset_peers(worker)

    def _finish(self, token: int) -> None:
        if token != self._token:
            return
        world = self._world
        self.is_finished = True
        world.trained_s = world.plan.work_s
        late_s = world.rng.choice([0.05, 0.5, 3.0])
        for worker in self.workers.values():
            world.later(world.rng.uniform(0, late_s), lambda worker=worker: self.end(worker, 0))

    def _err(self, token: int) -> None:
        if token == self._token:
            worker = self._world.rng.choice(list(self.workers.values()))
            self.end(worker, 1, FailureKind.EXCEPTION, is_own=True)

    def sicken(self, worker: Worker) -> None:
        """If its host is sick, a worker of a group that trains fails soon. Its agent and the other nodes are well."""
        world, token = self._world, self._token

        def fail() -> None:
            if token == self._token and worker.is_alive and worker.process.host.is_sick:
                self.end(worker, -BUS, is_own=True)

        if worker.process.host.is_sick and self.runs_since_s is not None:
            world.later(world.rng.uniform(*SICK_S), fail)

    def _fail_to_start(self, worker: Worker) -> None:
        self.end(worker, 1, FailureKind.STARTUP, is_own=True)

    def reset_peers(self, dead: Worker) -> None:
        """Workers that wait for a dead peer in a collective fail, unless they are out of reach or blind."""
        world = self._world
        if dead.process.host.is_silent:
            return
        for worker in self.workers.values():
            host = worker.process.host
            is_reached = host is dead.process.host or not (host.is_cut or dead.process.host.is_cut)
            if worker.is_alive and is_reached and world.rng.random() >= world.plan.peers_blind:
                kind = world.rng.choice([FailureKind.PEER_LOST, FailureKind.PEER_LOST, FailureKind.EXIT_CODE])
                world.later(world.rng.uniform(*PEER_LOST_S), lambda w=worker, k=kind: self._lose_peer(w, k))

    def _lose_peer(self, worker: Worker, kind: FailureKind) -> None:
        if not worker.is_alive or self.is_finished:
            return
        if kind is FailureKind.EXIT_CODE:
            # Only the worker's last output has the cause. It comes with `Cleared`.
            worker.process.tails[worker.local_rank] = PEER_TAIL
        elif self._world.rng.random() < 0.2:
            worker.has_raised = True
            worker.process.report(WorkerEnded(worker.generation, worker.local_rank, raised=True))
        self.end(worker, 1, kind)

    def _failure(self, worker: Worker, code: int, kind: FailureKind | None) -> Failure:
        kind = kind or (FailureKind.SIGNAL if code < 0 else FailureKind.EXIT_CODE)
        message = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        me = worker.process.agent.me
        failure = Failure(
            kind, worker.generation, worker.process.node_of[worker.generation], me.host, worker.rank, worker.local_rank,
            4711, code, message, progressed=self.progressed or self._world.rng.choice([False, None]),
        )  # fmt: skip
        if kind is FailureKind.EXCEPTION:
            return replace(failure, message="raised ValueError: 17", exception="ValueError", frame="train.py:3 in step")
        if kind in (FailureKind.PEER_LOST, FailureKind.STARTUP):
            return replace(failure, message=f"raised: {kind.value}")
        return failure
