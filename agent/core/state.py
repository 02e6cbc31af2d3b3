"""One agent's complete state, which `core.step` takes and returns: phase, membership, view of the store."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from elaunch.agent.core.actions import Actions
from elaunch.agent.core.events import StoreFailed, Tag
from elaunch.agent.diagnosis.hang import HangState
from elaunch.rendezvous.rules.leader import LeaderState
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Failure, JobSpec, Node, Outcome, OutcomeKind, RankTable, Seat

# A worker whose program has ended closes its connections before it exits: its atexit functions may take this long.
EXIT_S = 3.0


@dataclass(frozen=True)
class Joining:
    """No worker of this node runs; the node enters the job, joins its generations, and waits for a seat.

    `joined` is the newest generation that it has joined, `ran` the newest that it has run: a snapshot may not show yet
    that another was opened, and the old table must not start workers again. `spare_of` is the newest generation that
    had no seat for it.
    """

    joined: int = -1
    ran: int = -1
    spare_of: int = -1


@dataclass(frozen=True)
class ProgramEnd:
    """A worker's program has ended, and its process is exiting.

    It left its process group at `over_s` on this host's clock, and the agent learned of it at `known_s`. A process that
    still runs at `limit_s` is killed if the program `raised` an exception, else logged.
    """

    local_rank: int
    over_s: float
    known_s: float
    raised: bool
    limit_s: float = math.inf


@dataclass(frozen=True)
class WorkerStatus:
    """What a generation's workers have reported on their links, by local rank.

    Those in `to_stop` listen for `StopAtStepBoundary`, those in `to_failure` for `PeerFailed`; `listening` are those
    that have listened for either, so that one of their threads reads the link. Those in `stopped` have reached the step
    boundary at which all ranks stop, those in `saving` are saving after a failure. `ended` are the programs that
    ended before they were to stop.
    """

    listening: frozenset[int] = frozenset()
    to_stop: frozenset[int] = frozenset()
    to_failure: frozenset[int] = frozenset()
    stopped: frozenset[int] = frozenset()
    saving: frozenset[int] = frozenset()
    ended: tuple[ProgramEnd, ...] = ()

    @property
    def over(self) -> list[int]:
        """Those whose programs have ended, in the order in which they left their process group."""
        return [end.local_rank for end in sorted(self.ended, key=lambda end: end.over_s)]

    @property
    def returned(self) -> frozenset[int]:
        return frozenset(end.local_rank for end in self.ended if not end.raised)

    def exiting(self, now_s: float) -> frozenset[int]:
        """Those whose programs returned recently, and whose exit status is expected soon. Others linger."""
        return frozenset(e.local_rank for e in self.ended if not e.raised and now_s < e.known_s + 2 * EXIT_S)


@dataclass(frozen=True)
class HeldEnd:
    """An exit that may have been requested: the request may reach this agent until `until_s`.

    Without one it is `failure`, None where the last worker exited with 0. `is_stop`: the worker had stopped at a
    step boundary, as all ranks of the job did; else the scheduler may have signalled it. `effects` are failures that
    another rank may have caused; the exit of that rank is awaited.
    """

    failure: Failure | None
    until_s: float
    is_stop: bool = False
    effects: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Running:
    """This node's workers run.

    `live` are those that have not exited; `held` is an exit that is not explained yet. `is_first`: this agent ran no
    generation before. `hang_state` is what samples of their processes show. `ends` are the records of workers that
    exited with 0, in order.
    """

    table: RankTable
    live: frozenset[int]
    held: HeldEnd | None = None
    is_first: bool = True
    status: WorkerStatus = field(default_factory=WorkerStatus)
    hang_state: HangState = field(default_factory=HangState)
    ends: tuple[Failure, ...] = ()

    @property
    def leaving(self) -> frozenset[int]:
        """Workers whose programs raised an exception, and that still have time to exit."""
        return self.live & frozenset(e.local_rank for e in self.status.ended if e.raised and e.limit_s < math.inf)

    def on_way_out(self, now_s: float) -> frozenset[int]:
        """Workers whose programs have ended, and whose exit status is expected soon; not those in `stopped`."""
        return self.live & ((self.status.exiting(now_s) | self.leaving) - self.status.stopped)

    def seat_of(self, node_id: str) -> Seat:
        """This node's seat. A node that returns with a new id has stopped its workers first."""
        group_rank = self.table.group_rank(node_id)
        assert group_rank is not None
        return self.table.seats[group_rank]


class Mode(Enum):
    """How workers are stopped. The last mode is final."""

    BOUNDARY = "those that listen on their links stop after the same step as all ranks; the others got a signal"
    BROKEN = "a rank failed, so no step ends: those that listen save what only they hold; the others got a signal"
    KILLING = "all got SIGKILL; if one does not exit in time, the fork server is replaced"


@dataclass(frozen=True)
class Stopping:
    """This node's workers are being stopped, and at least one still runs.

    `live` are those that have not exited. They have until `due_s`, `grace_s` after they were notified: SIGKILL follows
    then, and later another fork server. Those in `signalled` got `signum`; those in `spent` were killed one by one, as
    soon as they had saved, or while others save. A worker that has not reached the boundary by `until_s` gets
    SIGTERM, where that is set. `notice` is a scheduler's signal that another node received first and that is forwarded
    here, 0 if there is none.

    `failures` are this node's failures in the generation: the first one, then those that followed and that the stop did
    not cause. Those in `answered` may have exited with a code that our signal caused. `ends` as in `Running`. `then` is
    the outcome that the agent exits with afterwards, None where it continues.
    """

    table: RankTable
    live: frozenset[int]
    due_s: float
    grace_s: float
    mode: Mode = Mode.BOUNDARY
    status: WorkerStatus = field(default_factory=WorkerStatus)
    signalled: frozenset[int] = frozenset()
    signum: int = 0
    notice: int = 0
    until_s: float | None = None
    spent: frozenset[int] = frozenset()
    then: Outcome | None = None
    failures: tuple[Failure, ...] = ()
    answered: frozenset[int] = frozenset()
    ends: tuple[Failure, ...] = ()

    @classmethod
    def of(cls, running: Running, now_s: float, grace_s: float, then: Outcome | None = None) -> Stopping:
        """The stop of running workers, before any of them is notified.

        Only the failures of the held exit that a lost peer caused are kept: this stop explains the exit itself.
        """
        failures = running.held.effects if running.held else ()
        # A process that lingers is signalled like any other.
        exiting = running.status.exiting(now_s)
        status = replace(running.status, ended=tuple(e for e in running.status.ended if e.local_rank in exiting))
        due_s, ends = now_s + grace_s, running.ends
        return cls(running.table, running.live, due_s, grace_s, status=status, then=then, failures=failures, ends=ends)

    @property
    def on_the_way(self) -> frozenset[int]:
        """Those that are to stop at a step boundary, and have not reached it yet."""
        waits = self.live - self.signalled - self.status.stopped
        return waits if self.mode is Mode.BOUNDARY else frozenset()

    @property
    def saving(self) -> frozenset[int]:
        """Those that are saving after a failure."""
        saving = (self.live & self.status.saving) - self.signalled - self.spent
        return saving if self.mode is Mode.BROKEN else frozenset()

    def hurried(self, now_s: float, grace_s: float) -> Stopping:
        """This stop with at most `grace_s` left."""
        return self if self.due_s <= now_s + grace_s else replace(self, due_s=now_s + grace_s, grace_s=grace_s)


@dataclass(frozen=True)
class Clearing:
    """The last worker has exited; the generation's remaining processes are ended, and its output is collected.

    `is_done`: all workers exited with 0. `failures`, `ends`, `answered` and `then` as in `Stopping`. An agent that is
    about to exit waits for the output until `until_s`.
    """

    table: RankTable
    until_s: float
    then: Outcome | None = None
    failures: tuple[Failure, ...] = ()
    ends: tuple[Failure, ...] = ()
    answered: frozenset[int] = frozenset()
    is_done: bool = False


@dataclass(frozen=True)
class Finished:
    """All workers of this node exited with 0; the agent stays until the job has ended. `ends` as in `Running`.

    It has reported that in a transaction, guarded by the revision `reported` of the generation's key.
    """

    table: RankTable
    ends: tuple[Failure, ...] = ()
    reported: int = 0


@dataclass(frozen=True)
class Exited:
    """The agent's work is done."""

    outcome: Outcome


Phase = Joining | Running | Stopping | Clearing | Finished | Exited


# A shorter wait is not logged.
LOG_AFTER_S = 2.0


@dataclass(frozen=True)
class Membership:
    """This node's membership in the job.

    `lease` is 0 while there is none. `next_id` names the incarnation that the node takes up when it returns as a new
    one. `belongs`: the run in the store is the one that this agent takes part in, or tries to join. `in_flight` is the
    transaction whose response is awaited, and nothing is decided from a snapshot older than `answered`, the revision of
    the last response. `refused`: the last join was; `outvoted`: the last election was lost; `evicted`: this node's
    member key is gone; `widened`: all keys are watched. `runs_refused` counts the runs that it could not start, since
    the job had members. The next try is at `run_again_s`, when their leases may have expired. `is_misfit`: the store
    has another job, over which this node has tried to start its own. `has_entered`: this node was a member once, so the
    store's address and login are right. The last lease was requested at `renewed_s`. A node without one requests
    another at `renew_at_s`, if that is not None.
    """

    lease: int = 0
    next_id: str = ""
    is_member: bool = False
    belongs: bool = False
    in_flight: Tag | None = None
    answered: int = 0
    refused: bool = False
    outvoted: bool = False
    evicted: bool = False
    widened: bool = False
    runs_refused: int = 0
    run_again_s: float = float("-inf")
    is_misfit: bool = False
    has_entered: bool = False
    renew_at_s: float | None = None
    renewed_s: float = float("-inf")


@dataclass(frozen=True)
class Reach:
    """Whether the store responds: it has failed since `failing_since_s`, None while it serves; `ever`: it once served.

    `last` is the last failed request. The outage is logged at `log_at_s`, or again if it `is_logged`. A node
    whose workers ended meanwhile has waited for the store since `idle_since_s`. The head's host has sent nothing at all
    since `silent_since_s`, None while it responds.
    """

    ever: bool = False
    failing_since_s: float | None = None
    log_at_s: float | None = None
    is_logged: bool = False
    last: StoreFailed = field(default_factory=lambda: StoreFailed(""))
    silent_since_s: float | None = None
    idle_since_s: float = float("-inf")


@dataclass(frozen=True)
class Waiting:
    """What the nodes wait for, logged at `due_s`; once it `is_logged`, the invitation to other nodes is due then."""

    text: str = ""
    due_s: float | None = None
    logged_s: float = float("-inf")
    is_logged: bool = False


@dataclass(frozen=True)
class Agent:
    """One agent's whole state.

    `notices` are a scheduler's signals before the job's end, as in `AgentConfig`. `table_seen` is the newest generation
    with a table, and when this agent first saw it; `progressed`: a worker of the last generation that ran here made
    progress; before `lossless_until_s` it declares no node lost. At `lead_at_s` it decides again without an event.
    `is_interrupted`: a person's SIGINT has arrived here. `restarts_hung`: a hang is a failure, as in `--on-hang
    restart`. `called` names the job in commands on this host. `last_failure` decided this node's last failed
    generation, and has all of its output. `logs` is the run's folder in the user's log folder, if there is
    one. `mismatch` is the last table's, which is logged. `invitation` and `only_here` are as in `AgentConfig`. All
    times are on this host's monotonic clock.
    """

    me: Node
    spec: JobSpec
    times: Times
    snapshot: Snapshot
    notices: tuple[int, ...] = ()
    phase: Phase = field(default_factory=Joining)
    membership: Membership = field(default_factory=Membership)
    reach: Reach = field(default_factory=Reach)
    leader_state: LeaderState = field(default_factory=LeaderState)
    lead_at_s: float | None = None
    lossless_until_s: float = 0.0
    waiting: Waiting = field(default_factory=Waiting)
    table_seen: tuple[int, float] = (-1, 0.0)
    progressed: bool = False
    is_interrupted: bool = False
    restarts_hung: bool = True
    called: str = ""
    last_failure: Failure | None = None
    logs: str = ""
    mismatch: str = ""
    invitation: str = ""
    only_here: str = ""

    @property
    def ending(self) -> Outcome | None:
        """The outcome to exit with, None until it is known; the agent then takes no further part in the job."""
        match self.phase:
            case Exited(outcome=outcome) | Stopping(then=outcome) | Clearing(then=outcome):
                return outcome
        return None

    @property
    def leads(self) -> bool:
        return self.membership.is_member and self.snapshot.leader == self.me.node_id

    def as_member(self, **changes: object) -> Agent:
        """This agent with these changes to its membership."""
        return replace(self, membership=replace(self.membership, **changes))  # type: ignore[arg-type]

    def outcome(self, kind: OutcomeKind, reason: str, *, signum: int = 0, failure: Failure | None = None) -> Outcome:
        """This agent's outcome, with the restarts that the job has used."""
        table = self.snapshot.table
        generation, restarts = (table.generation, table.restarts) if table else (0, 0)
        return Outcome(kind, reason, generation, restarts, self.spec.max_restarts, failure, signum)


Step = tuple[Agent, Actions]


def exit_with(agent: Agent, outcome: Outcome, actions: Actions = ()) -> Step:
    return replace(agent, phase=Exited(outcome)), actions
