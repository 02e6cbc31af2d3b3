"""The actions of an agent, which its loop carries out, and its messages to its workers on their links."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elaunch.agent.config import Level
from elaunch.agent.core.events import Tag
from elaunch.rendezvous.store import Txn
from elaunch.rendezvous.types import RankTable


class StopReason(Enum):
    """Why workers are to stop: nodes join, and training continues immediately; a node leaves; the job ends."""

    JOIN = "join"
    LEAVE = "leave"
    INTERRUPT = "interrupt"


@dataclass(frozen=True)
class StopAtStepBoundary:
    """All ranks have to stop after the same step. One that reported `stopped` may take its time to save and exit."""

    reason: StopReason


@dataclass(frozen=True)
class PeerFailed:
    """The group is broken: save what only this worker holds, and report `saved`; SIGKILL follows."""

    generation: int


@dataclass(frozen=True)
class ShowStacks:
    """Write the stacks of all threads to stderr."""


Message = StopAtStepBoundary | PeerFailed | ShowStacks


@dataclass(frozen=True)
class Commit:
    """Write to the store, after all that was written before; `Committed` follows if it has a tag.

    One without a tag needs no response: the next snapshot shows what happened.
    """

    txn: Txn
    tag: Tag | None = None


@dataclass(frozen=True)
class Join:
    """Reserve a port and put this node's `joined` key for the newest generation; `Committed` follows.

    `is_member` as in `transactions.join`.
    """

    lease: int
    is_member: bool
    progressed: bool


@dataclass(frozen=True)
class Renew:
    """Revoke the lease, if there is one, and grant another; `Leased` follows."""


@dataclass(frozen=True)
class Widen:
    """Watch all keys of the job from now on, not only those under `ctl/`."""


@dataclass(frozen=True)
class Spawn:
    """Start this node's workers."""

    table: RankTable
    group_rank: int


@dataclass(frozen=True)
class SignalWorkers:
    """Signal the workers of these local ranks."""

    generation: int
    local_ranks: frozenset[int]
    signum: int


@dataclass(frozen=True)
class NotifyWorkers:
    """Send the message to the workers of these local ranks, which listen on their links."""

    generation: int
    local_ranks: frozenset[int]
    message: Message


@dataclass(frozen=True)
class TakeStacks:
    """Take the stacks of the workers of these local ranks; `StacksTaken` follows."""

    generation: int
    local_ranks: frozenset[int]


@dataclass(frozen=True)
class NameThreads:
    """Log which threads keep the processes of these local ranks alive after their programs ended."""

    local_ranks: frozenset[int]


@dataclass(frozen=True)
class KeepStacks:
    """Write these stacks to the generation's folder, if there is a log folder."""

    generation: int
    text: str


@dataclass(frozen=True)
class Blame:
    """Report the hang as a failure of this local rank, or of this node with -1; `GroupFailed` follows.

    This node's ranks have been idle for `idle_s`. `is_blameless` as in `Failure`.
    """

    generation: int
    local_rank: int
    message: str
    idle_s: int
    is_blameless: bool = False


@dataclass(frozen=True)
class Clear:
    """End what is left of a generation on this node and collect its output; `Cleared` follows.

    With `is_done`, all workers exited with 0: their orphans may run until the agent exits.
    """

    generation: int
    is_done: bool = False


@dataclass(frozen=True)
class ReplaceForkServer:
    """End a fork server that does not respond, and its workers; `GroupFailed` follows."""

    generation: int


@dataclass(frozen=True)
class Log:
    """One sentence for the log: a failure is an `error`; a `warning` may need a person's attention and ends nothing."""

    text: str
    level: Level = "info"


Observing = TakeStacks | NameThreads | KeepStacks | Blame
WorkerAction = Spawn | SignalWorkers | NotifyWorkers | Observing | Clear | ReplaceForkServer
Action = Commit | Join | Renew | Widen | WorkerAction | Log
Actions = tuple[Action, ...]
