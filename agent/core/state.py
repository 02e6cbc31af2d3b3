"""One agent's whole state, as `core.step` hands it on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from elaunch.agent.core.actions import Action, Exit, Say
from elaunch.agent.core.events import Tag
from elaunch.agent.core.phases import NOT_JOINED, Clearing, Exited, Phase, Stopping
from elaunch.rendezvous.job_spec import JobSpec
from elaunch.rendezvous.rules.leading import LeaderState
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Failure, Node, Outcome, OutcomeKind

# A shorter wait is not worth a line in the log.
WORTH_A_WORD_S = 2.0


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


class Claim(Enum):
    """A node's claim to start the job's first run; `REFUSED` by another node's, or by a run."""

    UNTRIED = auto()
    HELD = auto()
    REFUSED = auto()


@dataclass(frozen=True)
class Membership:
    """What this node is to the job's other nodes.

    `lease` is 0 while there is none. `next_id` names the incarnation that the node takes up when it comes back as a new
    one. `belongs` says that the run in the store is one that this agent is, or wants to be, part of; `in_flight` is the
    transaction whose answer is awaited, and nothing is decided from a snapshot older than `answered`, the revision of
    the last answer. `refused` says that the last join was, `outvoted` that the last try to lead was, `evicted` that
    this node's member key is gone, `widened` that all keys are looked at. `runs_refused` counts the runs that it
    could not start, since the job had members. The next try is at `run_again_s`, when their leases may have ended.
    `claim` says whether this node may start the job's first run before all others.
    `misfit` is there where the job in the store is another one.
    `has_entered` says that this node was a member once, so the store's address and login are right.
    Its last lease began at `begun_s`. A node without one begins another at `renew_at_s`, if that is not None.
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
    claim: Claim = Claim.UNTRIED
    misfit: Misfit | None = None
    has_entered: bool = False
    renew_at_s: float | None = None
    begun_s: float = float("-inf")


class Trouble(Enum):
    """The kind of trouble with the store; the value is the end of a sentence."""

    AWAY = "is away"
    SLOW = "is too slow"
    OWN = "cannot be asked"
    REFUSES = "refuses what this node asks"


@dataclass(frozen=True)
class Reach:
    """How the store was reached: failing since `failing_since_s`, None while it does as asked; `ever` says that it did.

    `trouble` and `why` are those of the last failed request. `unsaid_until_s` is when it gets a line in the log, `said`
    has the kinds of trouble that have one, `said_s` is when the last was written. `is_heads` says that a node of the
    job serves the store. A node whose workers ended meanwhile has waited for the store since `idle_since_s`. The head's
    host `is_silent` if it sends nothing at all. It is lost since `silent_since_s`, None while it answers.
    """

    ever: bool = False
    failing_since_s: float | None = None
    unsaid_until_s: float | None = None
    trouble: Trouble = Trouble.AWAY
    why: str = ""
    is_heads: bool = False
    said: frozenset[tuple[Trouble, bool]] = frozenset()
    said_s: float = float("-inf")
    is_silent: bool = False
    silent_since_s: float | None = None
    idle_since_s: float = float("-inf")

    @property
    def is_said(self) -> bool:
        return bool(self.said)

    @property
    def kind(self) -> tuple[Trouble, bool]:
        """The kind of trouble: each is said once, and then what there is, once a minute."""
        return self.trouble, self.is_silent


@dataclass(frozen=True)
class Waiting:
    """What the nodes wait for. The log says it at `due_s`; None means that it was said.

    A node that waits in vain for others gets the line for them once more at `invite_s`.
    """

    text: str = ""
    due_s: float | None = None
    said_s: float = float("-inf")
    invite_s: float | None = None


@dataclass(frozen=True)
class Unsaid:
    """Lines for the log about ranks that lost a peer in `generation`: they wait for the cause, until `until_s`."""

    generation: int
    lines: tuple[Say, ...]
    until_s: float


NOT_YET = Membership()
UNTRIED = Reach()
FRESH_LEADER_STATE = LeaderState()
NO_WAIT = Waiting()


@dataclass(frozen=True)
class Agent:
    """One agent's whole state.

    `notices` are the signals by which a scheduler tells that the job's end is near, as in `AgentConfig`. `table_seen`
    is the newest generation with a table, and when this agent saw that first; `progressed` says whether a worker of the
    last generation that ran here made progress; before `lossless_until_s` it declares nobody lost. At `lead_at_s` it
    looks again without being told of anything. `is_interrupted` says that a person's SIGINT has arrived here.
    `restarts_hung` says that a hang is a failure, as in `--on-hang restart`. `called` is what a user of this host types
    for the job. `store_gone` says how the store that this host served has ended, for good. By `last_failure` this
    node's last failed generation is judged; it has all of its output. `logs` is the run's folder in the user's log
    folder, if there is one. `mismatch` is the last table's, which the log has; `unsaid` are lines that the log has not
    yet; `named` is the last failure on another node that it has instead of such lines. `invitation` and `only_here` are
    as in `AgentConfig`. All times are of this host's monotonic clock.
    """

    me: Node
    spec: JobSpec
    times: Times
    snapshot: Snapshot
    notices: tuple[int, ...] = ()
    phase: Phase = NOT_JOINED
    membership: Membership = NOT_YET
    reach: Reach = UNTRIED
    leader_state: LeaderState = FRESH_LEADER_STATE
    lead_at_s: float | None = None
    lossless_until_s: float = 0.0
    waiting: Waiting = NO_WAIT
    table_seen: tuple[int, float] = (-1, 0.0)
    progressed: bool = False
    is_interrupted: bool = False
    restarts_hung: bool = True
    called: str = ""
    store_gone: str = ""
    last_failure: Failure | None = None
    logs: str = ""
    mismatch: str = ""
    unsaid: Unsaid | None = None
    named: str = ""
    invitation: str = ""
    only_here: str = ""

    @property
    def is_going(self) -> bool:
        """Whether it is on its way out, so that it takes part in nothing more."""
        match self.phase:
            case Exited() | Stopping(then=Outcome()) | Clearing(then=Outcome()):
                return True
        return False

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


def say_after_cause(agent: Agent, said: Say) -> Step:
    """Say it, or after the lines that wait for a cause, if there are any."""
    if agent.unsaid is None:
        return agent, (said,)
    return replace(agent, unsaid=replace(agent.unsaid, lines=(*agent.unsaid.lines, said))), ()
