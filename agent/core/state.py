"""One agent's whole state, as `core.step` hands it on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from elaunch.agent.core.events import Action, Exit, Signalled, Tag
from elaunch.agent.core.hang import Quiet
from elaunch.rendezvous.rules.leading import LeaderState
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Failure, JobSpec, Node, Outcome, OutcomeKind, RankTable

# What lasts shorter than this is no wait.
WORTH_A_WORD_S = 2.0


@dataclass(frozen=True)
class Joining:
    """No workers run; `asked` is the newest generation that this node has joined.

    `ran` is the newest that it has run. The store may be slow to tell that another was opened, and the old table, which
    still stands then, must not start workers again. `spare_of` is the newest generation that had no seat for it.
    """

    asked: int = -1
    ran: int = -1
    spare_of: int = -1


@dataclass(frozen=True)
class Words:
    """What a generation's workers have said on their links, by local rank.

    Those in `to_stop` want to be told there when to stop, those in `to_failure` that a peer failed; those in `hearing`
    have listened to something, so that a thread of theirs hears what they are told. Those in `stopped` have come to the
    step boundary at which all ranks stop, those in `saving` save after a failure.
    """

    hearing: frozenset[int] = frozenset()
    to_stop: frozenset[int] = frozenset()
    to_failure: frozenset[int] = frozenset()
    stopped: frozenset[int] = frozenset()
    saving: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Held:
    """An end that may turn out to be somebody's wish: until `until_s` this agent may hear of that.

    `failure` is what it is otherwise, None where the last worker exited with 0. `is_stop` says that the worker had
    stopped at a step boundary, as all ranks of the job did; else the scheduler may have signalled it.
    """

    failure: Failure | None
    until_s: float
    is_stop: bool = False


SILENT = Words()
NOT_QUIET = Quiet()


@dataclass(frozen=True)
class Running:
    """The workers of `live` run; `held` is the end of one that waits to be understood.

    `leaving_s` holds until when each worker whose program raised an exception may take its time to end. `is_first` says
    that this agent ran no generation before. `quiet` is how long nothing was reported.
    """

    table: RankTable
    live: frozenset[int]
    leaving_s: tuple[tuple[int, float], ...] = ()
    held: Held | None = None
    is_first: bool = True
    words: Words = SILENT
    quiet: Quiet = NOT_QUIET


@dataclass(frozen=True)
class Stopping:
    """The workers of `live` are told to end, at the latest by SIGKILL at `kill_at_s`, `grace_s` after they were told.

    `failure` is this node's first failure of the generation, `others` are those that came while it was stopping and
    were not its doing. `then` is the outcome that the agent exits with afterwards, None where it goes on. `done` says
    that all workers exited with 0, `killed` that SIGKILL was sent. `summons` is a signal that came when they were done:
    it is obeyed once that is recorded.

    Those in `signalled` got `signum`, which asks them to end; the others were told on their links, and get it if they
    listen no more. They were asked to stop at a step boundary, for which they are given until `boundary_until_s` where
    that is set; or, where the group `is_broken`, to save. `spent` were killed alone: as soon as they had, or while
    others save. `notice` is a scheduler's that another node had first: until `notice_at_s`, where that is set, those in
    `signalled` have not got it, and do with this node's own, or then.
    """

    table: RankTable
    live: frozenset[int]
    kill_at_s: float
    grace_s: float = 0.0
    failure: Failure | None = None
    then: Outcome | None = None
    done: bool = False
    killed: bool = False
    others: tuple[Failure, ...] = ()
    summons: Signalled | None = None
    words: Words = SILENT
    signalled: frozenset[int] = frozenset()
    signum: int = 0
    notice: int = 0
    notice_at_s: float | None = None
    boundary_until_s: float | None = None
    is_broken: bool = False
    spent: frozenset[int] = frozenset()

    @classmethod
    def of(cls, running: Running, now_s: float, grace_s: float) -> Stopping:
        """What becomes of running workers, of whom none has been told yet."""
        return cls(running.table, running.live, now_s + grace_s, grace_s, words=running.words)

    @property
    def reached(self) -> frozenset[int]:
        """Who of those in `signalled` has got the signal."""
        return self.signalled if self.notice_at_s is None else frozenset()

    @property
    def on_the_way(self) -> frozenset[int]:
        """Who was asked to stop at a step boundary, and has not come to it yet."""
        return self.live - self.signalled - self.words.stopped

    @property
    def saving(self) -> frozenset[int]:
        """Who is saving after a failure."""
        return (self.live & self.words.saving) - self.signalled - self.spent if self.is_broken else frozenset()

    def hurried(self, now_s: float, grace_s: float) -> Stopping:
        """With no more time than that from now on."""
        return self if self.kill_at_s <= now_s + grace_s else replace(self, kill_at_s=now_s + grace_s, grace_s=grace_s)


@dataclass(frozen=True)
class Finished:
    """All workers of this node exited with 0; it stays until the job has ended."""

    table: RankTable


@dataclass(frozen=True)
class Exited:
    """Nothing more to do."""

    outcome: Outcome


Phase = Joining | Running | Stopping | Finished | Exited


@dataclass(frozen=True)
class Misfit:
    """A node that does not fit the job in the store, until `until_s`: that one may turn out to be dead.

    It tries to start its own again at `again_s`; `has_tried` says that it has, `is_over` that this was the last time.
    """

    until_s: float
    again_s: float = 0.0
    has_tried: bool = False
    is_over: bool = False
    is_said: bool = False


@dataclass(frozen=True)
class Membership:
    """What this node is to the job's other nodes.

    `lease` is 0 while there is none. `next_id` names the incarnation that the node takes up when it comes back as a new
    one. `belongs` says that the run in the store is one that this agent is, or wants to be, part of; `in_flight` is the
    transaction whose answer is awaited, and nothing is decided from a snapshot older than `answered`, the revision of
    the last answer. `refused` says that the last join was, `outvoted` that the last try to lead was, `evicted` that
    this node's member key is gone, `widened` that all keys are looked at. `runs_refused` counts the runs that it
    could not start, since the job had members. The next try is at `run_again_s`, when their leases may have ended.
    `misfit` is there where the job in the store is another one.
    `has_entered` says that this node was a member once, so the store's address and login are right.
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
    misfit: Misfit | None = None
    has_entered: bool = False


class Trouble(Enum):
    """The kind of trouble with the store; the value is the end of a sentence."""

    AWAY = "is away"
    SLOW = "is too slow"
    REFUSES = "refuses what this node asks"


@dataclass(frozen=True)
class Reach:
    """How the store was reached: failing since `failing_since_s`, None while it does as asked; `ever` says that it did.

    `trouble` and `why` are those of the last failed request. `unsaid_until_s` is when it gets a line in the log,
    `is_said` says that it has one, `said_s` when. `is_heads` says that a node of the job serves the store. A node whose
    workers ended meanwhile has waited for the store since `idle_since_s`.
    """

    ever: bool = False
    failing_since_s: float | None = None
    unsaid_until_s: float | None = None
    trouble: Trouble = Trouble.AWAY
    why: str = ""
    is_heads: bool = False
    is_said: bool = False
    said_s: float = float("-inf")
    idle_since_s: float = float("-inf")


@dataclass(frozen=True)
class Waiting:
    """What everybody waits for, worth a word at `due_s`; None where it was said."""

    text: str = ""
    due_s: float | None = None
    said_s: float = float("-inf")


NOT_YET = Membership()
UNTRIED = Reach()
FRESH_LEADER_STATE = LeaderState()
NO_WAIT = Waiting()


@dataclass(frozen=True)
class Agent:
    """One agent's whole state.

    `notices` are the signals by which a scheduler tells that the job's end is near, as in `AgentConfig`.
    `table_seen` is the newest generation with a table, and when this agent saw that first; `progressed` says whether a
    worker of the last generation that ran here made progress; before `lossless_until_s` it declares nobody lost. At
    `lead_at_s` it looks again without being told of anything. `is_interrupted` says that a person's SIGINT has arrived
    here. `store_gone` says how the store that this host served has ended, for good. All times are of this host's
    monotonic clock.
    """

    me: Node
    spec: JobSpec
    times: Times
    snapshot: Snapshot
    notices: tuple[int, ...] = ()
    phase: Phase = Joining()
    membership: Membership = NOT_YET
    reach: Reach = UNTRIED
    leader_state: LeaderState = FRESH_LEADER_STATE
    lead_at_s: float | None = None
    lossless_until_s: float = 0.0
    waiting: Waiting = NO_WAIT
    table_seen: tuple[int, float] = (-1, 0.0)
    progressed: bool = False
    is_interrupted: bool = False
    store_gone: str = ""

    @property
    def is_going(self) -> bool:
        """Whether it is on its way out, so that it takes part in nothing more."""
        return isinstance(self.phase, Exited) or (isinstance(self.phase, Stopping) and self.phase.then is not None)

    @property
    def leads(self) -> bool:
        return self.membership.is_member and self.snapshot.leader == self.me.node_id

    def as_member(self, **changes: object) -> Agent:
        """With changes to its membership."""
        return replace(self, membership=replace(self.membership, **changes))  # type: ignore[arg-type]

    def outcome(self, kind: OutcomeKind, reason: str, *, signum: int = 0, failure: Failure | None = None) -> Outcome:
        """How this agent's part ends, with what the job has used up so far."""
        table = self.snapshot.table
        generation, restarts = (table.generation, table.restarts) if table else (0, 0)
        return Outcome(kind, reason, generation, restarts, self.spec.max_restarts, failure, signum)


Step = tuple[Agent, tuple[Action, ...]]


def exit_with(agent: Agent, outcome: Outcome) -> Step:
    return replace(agent, phase=Exited(outcome)), (Exit(outcome),)
