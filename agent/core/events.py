"""The events of an agent: what the store, its workers, signals and timers report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from signal import SIGINT, SIGPIPE, SIGTERM

from elaunch.agent.diagnosis.causes.cause import NO_FACTS, Facts
from elaunch.agent.diagnosis.hang import Window
from elaunch.agent.diagnosis.stack_groups import Stack
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.types import Failure

# Signals by which a user ends the job on all nodes, not only this node's part in it. No process sends SIGPIPE: the
# reader of the agent's stdout has closed it (agent/output/streams.py).
ENDS_JOB = frozenset((SIGINT, SIGPIPE))
# A shell reports a program that a signal killed with this exit code plus the signal's number.
SHELL_BASE = 128


class Tag(Enum):
    """Transactions whose response the agent waits for; only one at a time."""

    RUN = "start a run"
    JOIN = "join"
    RETURN = "return"
    ELECT = "become leader"
    STANDING = "still a member"
    LEAD = "lead"


@dataclass(frozen=True)
class SnapshotChanged:
    """The store's keys, as they are now."""

    snapshot: Snapshot


@dataclass(frozen=True)
class Leased:
    """The store has granted this node a lease; `node_id` is a name for a new incarnation of it."""

    lease: int
    node_id: str


@dataclass(frozen=True)
class LeaseLost:
    """The lease has expired, and with it this node's keys."""

    lease: int


@dataclass(frozen=True)
class Committed:
    """The store's response to a `Commit` with a tag; `held` as in `store.TxnResponse`.

    `revision` is 0 where nothing was written, since the lease of a put had expired.
    """

    tag: Tag
    held: bool
    revision: int


class Trouble(Enum):
    """Why requests to the store fail; the value is the end of a sentence."""

    AWAY = "is unreachable"
    SLOW = "is too slow"
    OWN = "cannot be connected to"
    REFUSES = "refuses this node's requests"
    DENIED = "denies this node's requests"


@dataclass(frozen=True)
class StoreFailed:
    """A request to the store failed, and is retried. `why` is a sentence without a full stop.

    The trouble is OWN where this agent cannot open a connection, so nothing is known of the store; DENIED where waiting
    alone does not help. `is_heads`: a node of the job serves the store. `is_silent`: nothing came from the head's host,
    not even a refusal: it may be off, and its ranks are lost with it.
    """

    why: str
    trouble: Trouble = Trouble.AWAY
    is_heads: bool = False
    is_silent: bool = False


@dataclass(frozen=True)
class StoreBack:
    """The store serves this node's requests again."""


@dataclass(frozen=True)
class StoreLost:
    """The store has been replaced by another, or has data that cannot be read. `why` as in `StoreFailed`."""

    why: str


@dataclass(frozen=True)
class WorkerExited:
    """A worker has exited; `failure` is None where it exited with 0. `code` is as in `Failure`.

    `end` is the record of a program that ended without an exception, of the kind ENDED_EARLY. It counts if
    other ranks still wait for this one. A signal may have ended the process on its way out.
    """

    generation: int
    local_rank: int
    code: int
    failure: Failure | None = None
    end: Failure | None = None


@dataclass(frozen=True)
class WorkerEnded:
    """A worker's program ended, by an exception if it `raised`; the process is exiting, which may hang.

    `over_s` is when it left its process group, or else ended, on this host's monotonic clock.
    """

    generation: int
    local_rank: int
    over_s: float = 0.0
    raised: bool = False


@dataclass(frozen=True)
class WorkerListens:
    """A worker listens on its link: the notices that it receives there from now on, instead of a signal."""

    generation: int
    local_rank: int
    to_stop: bool
    to_failure: bool


@dataclass(frozen=True)
class _AtStep:
    generation: int
    local_rank: int
    step: int


class WorkerSaving(_AtStep):
    """After a peer's failure: this worker is saving `step`, and gets time for it."""


class WorkerSaved(_AtStep):
    """After a peer's failure: this worker's state up to `step` is stored elsewhere, and it may be killed."""


class WorkerStopped(_AtStep):
    """A worker has stopped after `step`, as all ranks of the job do, and is about to save and to exit."""


@dataclass(frozen=True)
class Sampled:
    """A sample of the workers' processes: what each of them did since the last one, by local rank."""

    generation: int
    windows: Mapping[int, Window]


@dataclass(frozen=True)
class StacksTaken:
    """The stacks of the workers that `TakeStacks` named."""

    generation: int
    stacks: tuple[Stack, ...]


@dataclass(frozen=True)
class GroupFailed:
    """This node's workers hang, or their worker store has exited, or the fork server and all workers with it."""

    generation: int
    failure: Failure
    workers_too: bool = False


@dataclass(frozen=True)
class Signalled:
    """The agent received a signal that it handles; with `is_order`, `elaunch stop` in SIGINT's place."""

    signum: int
    name: str
    is_order: bool = False

    @property
    def to_workers(self) -> int:
        """The signal that workers get. Python ignores SIGPIPE, and the background job of a shell ignores SIGINT."""
        return SIGTERM if self.is_order or self.signum == SIGPIPE else self.signum


@dataclass(frozen=True)
class RestartOrdered:
    """`elaunch restart`: the workers of all nodes are to start again."""


@dataclass(frozen=True)
class Cleared:
    """After `Clear`: no process of the generation is left, and all of its output has arrived.

    `tails` are the ends of the local ranks' stderr; `progressed`: a worker of this node had made progress. `facts` are
    what was collected on this host after a failure.
    """

    generation: int
    tails: Mapping[int, str] = field(default_factory=dict)
    progressed: bool = False
    facts: Facts = NO_FACTS


class SnapshotPending:
    """Placeholder for a `SnapshotChanged` that is built when the loop takes it: changes coalesce into one event."""


@dataclass(frozen=True)
class Tick:
    """A deadline of the agent's may have passed."""


StoreEvent = SnapshotChanged | Leased | LeaseLost | Committed | StoreFailed | StoreBack | StoreLost
LinkEvent = WorkerEnded | WorkerListens | WorkerSaving | WorkerSaved | WorkerStopped
WorkerEvent = LinkEvent | WorkerExited | Sampled | StacksTaken | GroupFailed | Cleared
Event = StoreEvent | WorkerEvent | Signalled | RestartOrdered | Tick
